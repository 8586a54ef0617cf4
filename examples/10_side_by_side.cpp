// 10_side_by_side: the same requests, the same model, the same kernels, the same memory, served three
// ways. Only the order of the work differs; so the answers may not, and this program checks that.
//
//   serial      one request after another
//   static      the school bus: a batch is filled, padded, and runs until its last member is done
//   continuous  the shuttle: requests get on and off at every step, KV in pages, shared prefixes
//
// Chapter: docs/10_side_by_side.md
#include <cmath>
#include <cstdio>
#include <functional>
#include <servelite/json.hpp>
#include <servelite/plot.hpp>
#include <servelite/servelite.hpp>
#include <servelite/trace.hpp>

#include "cli.hpp"

using namespace servelite;

namespace {

struct Setup {
  const LoadedModel* loaded;
  std::vector<Request> workload;
  int blocks, block_size, seats, threads;
  StaticOptions bus;

  ModelLimits limits() const {
    return {loaded->model.config.context, loaded->model.config.vocabulary, loaded->tokenizer.eos()};
  }
};

/// A way of serving: makes its batcher over a fresh pool. All of them run on one executor.
struct Way {
  std::string name;
  std::function<std::unique_ptr<Batcher>(BlockPool&, const Setup&)> make;
};

Way bus(const std::string& name, int seats) {
  return {name, [seats](BlockPool& pool, const Setup& s) {
            StaticOptions options = s.bus;
            options.seats = seats > 0 ? seats : s.seats;
            return std::make_unique<StaticBatcher>(pool, s.limits(), options);
          }};
}

Way shuttle(const std::string& name, bool joining, bool paging, bool sharing) {
  return {name, [=](BlockPool& pool, const Setup& s) {
            ContinuousOptions options;
            options.seats = s.seats, options.joining = joining, options.paging = paging,
            options.sharing = sharing;
            return std::make_unique<ContinuousBatcher>(pool, s.limits(), options);
          }};
}

RunReport run_once(const Way& way, const Setup& s, Executor& executor) {
  BlockPool pool(s.blocks, s.block_size);
  const std::unique_ptr<Batcher> batcher = way.make(pool, s);
  ServeOptions options;
  options.tokenizer = &s.loaded->tokenizer;
  return serve(way.name, *batcher, executor, s.workload, options);
}

/// Every way `repeats` times, in turn, so that a slow moment of the machine hits all alike; of each the
/// run with the median makespan. The first round warms up and is thrown away.
std::vector<RunReport> run_all(const std::vector<Way>& ways, const Setup& s, Executor& executor,
                               int repeats) {
  std::vector<std::vector<RunReport>> runs(ways.size());
  for (int round = 0; round <= repeats; ++round)
    for (size_t w = 0; w < ways.size(); ++w) {
      RunReport report = run_once(ways[w], s, executor);
      if (round > 0) runs[w].push_back(std::move(report));
    }
  std::vector<RunReport> median;
  for (std::vector<RunReport>& r : runs) {
    const auto middle = r.begin() + static_cast<ptrdiff_t>(r.size() / 2);
    std::nth_element(r.begin(), middle, r.end(), [](const RunReport& a, const RunReport& b) {
      return summarize(a).makespan < summarize(b).makespan;
    });
    median.push_back(std::move(*middle));
  }
  return median;
}

/// Empty if both runs agree in every token and every bit of every logit; else the first difference.
std::string first_difference(const RunReport& a, const RunReport& b) {
  for (size_t i = 0; i < a.requests.size(); ++i) {
    const RequestRecord &x = a.requests[i], &y = b.requests[i];
    const std::string where = "request " + std::to_string(i) + ", " + a.name + " against " + b.name + ": ";
    for (size_t t = 0; t < std::max(x.output.size(), y.output.size()); ++t) {
      if (t >= x.output.size() || t >= y.output.size())
        return where + std::to_string(x.output.size()) + " tokens against " + std::to_string(y.output.size());
      if (x.output[t] != y.output[t])
        return where + "token " + std::to_string(t) + " is " + std::to_string(x.output[t]) + " against " +
               std::to_string(y.output[t]);
      if (x.logits_hash[t] != y.logits_hash[t])
        return where + "the logits of token " + std::to_string(t) + " differ though the token is the same";
    }
    if (x.finish != y.finish)
      return where + "finished by " + name_of(x.finish) + " against " + name_of(y.finish);
  }
  return "";
}

// ---- what is printed --------------------------------------------------------------------------------

using Cell = std::function<std::string(const RunReport&, const Summary&)>;

std::string text(const char* format, double value) {
  char buffer[64];
  std::snprintf(buffer, sizeof buffer, format, value);
  return buffer;
}
std::string ms(double seconds) { return std::isnan(seconds) ? "-" : text("%.1f", seconds * 1e3); }
std::string two(const Percentiles& p) { return ms(p.p50) + " / " + ms(p.p95); }
std::string count(int64_t n) { return std::to_string(n); }

void print_table(const std::vector<RunReport>& runs) {
  const std::vector<std::pair<const char*, Cell>> rows = {
      {"seats", [](auto& r, auto&) { return count(r.seats); }},
      {"makespan, ms", [](auto&, auto& s) { return ms(s.makespan); }},
      {"output tokens/s", [](auto&, auto& s) { return text("%.0f", s.output_tok_s); }},
      {"requests/s", [](auto&, auto& s) { return text("%.1f", s.requests_s); }},
      {"TTFT p50 / p95, ms", [](auto&, auto& s) { return two(s.ttft); }},
      {"ITL p50 / p95, ms", [](auto& r, auto& s) { return r.streamed ? two(s.itl) : "all at once"; }},
      {"E2E p50 / p95, ms", [](auto&, auto& s) { return two(s.e2e); }},
      {"queue time p50 / p95, ms", [](auto&, auto& s) { return two(s.queue); }},
      {"", nullptr},
      {"forward passes", [](auto& r, auto&) { return count(static_cast<int64_t>(r.steps.size())); }},
      {"prefill tokens computed", [](auto&, auto& s) { return count(s.prefill_computed); }},
      {"  of which unique", [](auto&, auto& s) { return count(s.prefill_unique); }},
      {"rows useful", [](auto&, auto& s) { return count(s.rows_useful); }},
      {"rows wasted: padding", [](auto&, auto& s) { return count(s.rows_padding); }},
      {"  dead seats", [](auto&, auto& s) { return count(s.rows_dead); }},
      {"  recomputed prefix", [](auto&, auto& s) { return count(s.rows_recomputed); }},
      {"preemptions", [](auto&, auto& s) { return count(s.preemptions); }},
      {"KV peak used, tokens", [](auto&, auto& s) { return count(s.kv_peak_used); }},
      {"KV peak reserved", [](auto&, auto& s) { return count(s.kv_peak_reserved); }},
      {"waiting, though KV had room", [](auto&, auto& s) { return count(s.would_fit_most) + " at most"; }},
      {"", nullptr},
      {"per request: tokenise, admit, ms",
       [](auto&, auto& s) { return text("%.3f", 1e3 * s.prepare_s / s.requests); }},
      {"scheduler share of time",
       [](auto&, auto& s) {
         return text("%.1f %%", 100 * s.schedule_s / (s.schedule_s + s.sample_s + s.forward_s));
       }},
  };
  std::printf("%-34s", "");
  for (const RunReport& r : runs) std::printf("%16s", r.name.c_str());
  std::printf("\n");
  for (const auto& [label, cell] : rows) {
    std::printf("%-34s", label);
    for (const RunReport& r : runs)
      if (cell) std::printf("%16s", cell(r, summarize(r)).c_str());
    std::printf("\n");
  }
}

void print_answers(const RunReport& run, const Tokenizer& tokenizer) {
  for (const RequestRecord& r : run.requests) {
    std::printf("\n[%d] %s\n", r.index, printable(r.user).c_str());
    if (r.finish == Finish::refused)
      std::printf("    refused: %s\n", r.refusal.c_str());
    else
      std::printf("    %s\n    (%zu tokens, finish: %s)\n", printable(tokenizer.decode(r.output)).c_str(),
                  r.output.size(), name_of(r.finish));
  }
}

void print_ladder(const std::vector<RunReport>& runs) {
  std::printf("\nThe shuttle, one gain at a time\n%-34s%12s%12s%12s%12s%12s\n", "", "makespan", "TTFT p50",
              "E2E p95", "prefill", "KV peak");
  std::printf("%-34s%12s%12s%12s%12s%12s\n", "", "ms", "ms", "ms", "tokens", "reserved");
  for (const RunReport& r : runs) {
    const Summary s = summarize(r);
    std::printf("%-34s%12s%12s%12s%12s%12s\n", r.name.c_str(), ms(s.makespan).c_str(), ms(s.ttft.p50).c_str(),
                ms(s.e2e.p95).c_str(), count(s.prefill_computed).c_str(), count(s.kv_peak_reserved).c_str());
  }
}

// ---- what is written --------------------------------------------------------------------------------

void put(Json& json, const char* key, const Percentiles& p) {
  json.key(key)
      .begin_object()
      .field("p50", p.p50)
      .field("p95", p.p95)
      .field("p99", p.p99)
      .field("mean", p.mean)
      .end_object();
}

std::string report_json(const std::string& model, const std::string& workload, bool identical,
                        const std::vector<RunReport>& runs) {
  Json json;
  json.begin_object().field("model", model).field("workload", workload).field("outputs_identical", identical);
  json.key("runs").begin_array();
  for (const RunReport& r : runs) {
    const Summary s = summarize(r);
    json.begin_object().field("name", r.name).field("seats", r.seats).field("streamed", r.streamed);
    json.field("makespan_s", s.makespan)
        .field("output_tokens", s.output_tokens)
        .field("output_tok_s", s.output_tok_s);
    json.field("requests_s", s.requests_s);
    put(json, "ttft_s", s.ttft), put(json, "itl_s", s.itl), put(json, "tpot_s", s.tpot);
    put(json, "e2e_s", s.e2e), put(json, "queue_s", s.queue);
    json.field("prefill_tokens_computed", s.prefill_computed)
        .field("prefill_tokens_unique", s.prefill_unique);
    json.field("rows_useful", s.rows_useful)
        .field("rows_padding", s.rows_padding)
        .field("rows_dead", s.rows_dead);
    json.field("rows_recomputed", s.rows_recomputed).field("preemptions", s.preemptions);
    json.field("kv_peak_used_tokens", s.kv_peak_used).field("kv_reserved_tokens", s.kv_peak_reserved);
    json.field("kv_capacity_tokens", r.kv_capacity_tokens).field("would_fit", s.would_fit_most);
    json.field("prepare_s", s.prepare_s).field("schedule_s", s.schedule_s).field("sample_s", s.sample_s);
    json.field("forward_s", s.forward_s).field("steps", static_cast<int64_t>(r.steps.size())).end_object();
  }
  json.end_array().key("answers").begin_array();
  for (const RequestRecord& r : runs.back().requests) {
    json.begin_object().field("id", r.index).field("prompt", r.user).field("text", r.text);
    json.key("tokens").begin_array();
    for (const int t : r.output) json.value(t);
    json.end_array().field("finish", name_of(r.finish));
    if (r.finish == Finish::refused) json.field("refusal", r.refusal);
    json.end_object();
  }
  json.end_array().end_object();
  return json.str();
}

std::string machine_line(const Config& c, const Setup& s, int threads) {
  const int64_t tokens = int64_t{s.blocks} * s.block_size;
  return std::string(lanes::kName) + ", " + count(threads) + (threads == 1 ? " thread" : " threads") +
         "; KV memory " + text("%.1f", static_cast<double>(tokens * c.kv_bytes_per_token()) / (1 << 20)) +
         " MB = " + count(tokens) + " tokens = " + count(s.blocks) + " blocks of " + count(s.block_size) +
         " = " + text("%.1f", static_cast<double>(tokens) / c.context) + " full contexts of " +
         count(c.context);
}

int run(Options& o) {
  const LoadedModel loaded = load_model(o.text("model"));
  const Config& c = loaded.model.config;
  Setup s;
  s.loaded = &loaded;
  s.workload = load_workload(o.text("workload"));
  s.seats = o.integer("seats", 1, 4096);
  s.block_size = o.integer("block", 1, 4096);
  s.threads = o.threads();
  s.bus.patience = o.real("patience-ms", 0, 60000) / 1000;
  s.bus.stream = o.flag("stream");
  const double bytes = o.real("kv-mb", 0.001, 1e6) * (1 << 20);
  const double block_bytes = static_cast<double>(c.kv_bytes_per_token() * s.block_size);
  const int needed = (c.context + s.block_size - 1) / s.block_size;  // serial and bus reserve a full context
  if (bytes < needed * block_bytes || bytes / block_bytes * s.block_size > 1e9)
    fail("--kv-mb: expected room for one full context of ", c.context, " tokens in blocks of ", s.block_size,
         ", ", needed * block_bytes / (1 << 20), " MB, and for at most a billion, found ", o.text("kv-mb"),
         " MB");
  s.blocks = static_cast<int>(bytes / block_bytes);
  o.check_outputs({"json", "trace", "png"});

  Transformer executor(loaded.model, s.blocks, s.block_size, s.threads);
  const int repeats = o.integer("repeats", 1, 1000);
  std::printf("%zu requests (%s), served three ways by %s\n%s\nmedian of %d runs each\n\n", s.workload.size(),
              o.text("workload").c_str(), o.text("model").c_str(),
              machine_line(c, s, executor.threads()).c_str(), repeats);
  std::fflush(stdout);

  const std::vector<RunReport> runs = run_all(
      {bus("serial", 1), bus("static", 0), shuttle("continuous", true, true, true)}, s, executor, repeats);
  print_table(runs);
  const double serial = summarize(runs[0]).makespan, fixed = summarize(runs[1]).makespan,
               ours = summarize(runs[2]).makespan;
  if (serial > 0)
    std::printf(
        "\nmakespan: static is %.2f x as fast as serial, continuous %.2f x as fast as static and %.2f x as "
        "fast as serial\n",
        serial / fixed, fixed / ours, serial / ours);
  print_answers(runs[2], loaded.tokenizer);

  std::vector<RunReport> ladder =
      run_all({shuttle("nothing on", false, false, false), shuttle("joining", true, false, false),
               shuttle("paging", false, true, false), shuttle("prefix sharing", false, false, true),
               shuttle("joining + paging", true, true, false),
               shuttle("joining + paging + sharing", true, true, true)},
              s, executor, repeats);
  print_ladder(ladder);

  std::string difference;
  std::vector<const RunReport*> others;
  for (const RunReport& r : runs) others.push_back(&r);
  for (const RunReport& r : ladder) others.push_back(&r);
  for (const RunReport* r : others)
    if (difference.empty()) difference = first_difference(runs[0], *r);
  if (summarize(runs[0]).output_tokens == 0)
    std::printf("\nEvery request was refused: nothing was served, there is nothing to compare.\n");
  else if (difference.empty())
    std::printf("\nAll %zu ways gave the same tokens from the same logits, bit for bit.\n", others.size());
  else
    std::printf("\nTHE ANSWERS DIFFER. First difference: %s\n", difference.c_str());

  const auto write = [&](const char* option, const auto& how) {
    if (o.text(option).empty()) return;
    how(o.text(option));
    std::printf("wrote %s\n", o.text(option).c_str());
  };
  write("json", [&](auto& f) {
    write_file(f, report_json(o.text("model"), o.text("workload"), difference.empty(), runs));
  });
  write("trace", [&](auto& f) { write_file(f, chrome_trace(runs)); });
  write("png", [&](auto& f) { plot_timeline(f, runs, "The same requests, served three ways"); });
  return difference.empty() ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  return run_main("10_side_by_side", [&] {
    Options o("10_side_by_side",
              "the same requests on the same model, served one by one, by bus and by shuttle");
    o.add("model", "F", SERVELITE_MODEL, "GGUF file");
    o.add("workload", "six|F", "six", "the six-request scene or a workload file (docs/10_side_by_side.md)");
    o.add("seats", "N", "8", "most requests in a batch");
    o.add("kv-mb", "X", "8", "KV memory in MB (2^20 bytes), the same for all");
    o.add("block", "N", "16", "tokens in a block of KV");
    o.add("threads", "N", "0", "threads of the forward pass; 0: all cores");
    o.add("patience-ms", "X", "20", "how long the bus waits for more passengers");
    o.add("stream", "", "", "bus and serial: tokens leave as they are sampled, not when the bus is back");
    o.add("repeats", "N", "5", "runs of each way; the one with the median makespan is shown");
    o.add("json", "F", "", "write the report as JSON");
    o.add("png", "F", "side_by_side.png", "write the timeline; empty: none");
    o.add("trace", "F", "", "write a trace for ui.perfetto.dev");
    return o.parse(argc, argv) ? run(o) : 0;
  });
}
