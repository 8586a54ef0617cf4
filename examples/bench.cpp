// bench: how near the kernels are to what this machine can do at all.
//
// First the machine's ceilings, measured here and now: multiply-adds a second, 8-bit products a second, bytes
// read a second. Then the model, each phase as tokens/s, GFLOP/s and GB/s, and as a part of the ceiling that
// binds it: no code could be faster than the larger of (operations / peak) and (bytes / bandwidth).
//
// Chapter: docs/benchmarks.md
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <servelite/json.hpp>
#include <servelite/preset.hpp>
#include <servelite/roofline.hpp>
#include <servelite/servelite.hpp>
#ifdef SERVELITE_POSIX
  #include <sys/resource.h>
#endif

#include "cli.hpp"

using namespace servelite;

namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Timing {
  double median, spread;  // seconds of one call; (third quartile - first) / median
};

/// Calls f again and again, for `budget` seconds and at least five times; the first call warms up.
Timing measure(double budget, const std::function<void()>& f) {
  f();
  std::vector<double> times;
  for (const double begin = now(); times.size() < 5 || now() - begin < budget;) {
    const double start = now();
    f();
    times.push_back(now() - start);
  }
  std::sort(times.begin(), times.end());
  const size_t n = times.size();
  return {times[n / 2], (times[n * 3 / 4] - times[n / 4]) / times[n / 2]};
}

/// f(thread) on all threads at once.
template <class F>
void on_threads(int threads, F&& f) {
#ifdef _OPENMP
  #pragma omp parallel num_threads(threads)
  f(omp_get_thread_num());
#else
  for (int t = 0; t < threads; ++t) f(t);
#endif
}

void progress(const std::string& what) {
#ifdef SERVELITE_POSIX
  if (isatty(2)) std::fprintf(stderr, "\r\033[K%s ", what.c_str());
#else
  (void)what;
#endif
}

// ---- ceilings -------------------------------------------------------------------------------------------

volatile float sink;  // what is computed must be used, or it is not computed

// As many independent chains as hide the latency and fit into registers. The loops over them unroll
// completely: an array that a loop runs over would live in memory.
constexpr int kChains = kManyRegisters ? 24 : std::max(1, 12 / lanes::kRegs);
#define EACH_CHAIN _Pragma("GCC unroll 24") for (int i = 0; i < kChains; ++i)

/// Fused multiply-adds on registers alone. In GFLOP/s.
double fma_peak(int threads, double budget) {
  constexpr int kRounds = 100000;
  const Timing t = measure(budget, [&] {
    on_threads(threads, [&](int thread) {
      f32x16 acc[kChains];
      const f32x16 a = splat(0.999f), b = splat(1e-3f * static_cast<float>(thread));
      EACH_CHAIN acc[i] = splat(static_cast<float>(i));
      for (int round = 0; round < kRounds; ++round) EACH_CHAIN acc[i] = fma(acc[i], a, b);
      f32x16 all = splat(0.0f);
      EACH_CHAIN all = add(all, acc[i]);
      sink = sum(all);
    });
  });
  return 1e-9 * threads * 2.0 * 16 * kChains * kRounds / t.median;
}

volatile int32_t four_weights = 0x01020304, four_inputs = 0x01010101;  // read anew each round: no constants

/// The same for dot4: 4 products and 4 sums a lane. In GOP/s.
double int8_peak(int threads, double budget) {
  constexpr int kRounds = 100000;
  const Timing t = measure(budget, [&] {
    on_threads(threads, [&](int) {
      i32x16 acc[kChains];
      EACH_CHAIN acc[i] = splat_int(i);
      for (int round = 0; round < kRounds; ++round) {
        const i32x16 w = splat_int(four_weights), x = splat_int(four_inputs);
        EACH_CHAIN acc[i] = dot4(acc[i], w, x);
      }
      f32x16 all = splat(0.0f);
      EACH_CHAIN all = add(all, to_float(acc[i]));
      sink = sum(all);
    });
  });
  return 1e-9 * threads * 2.0 * 64 * kChains * kRounds / t.median;
}

/// Reads `bytes` over and over, in huge pages, each thread its own part in order, and adds the numbers up (in
/// eight sums, so that none waits). In GB/s.
double read_rate(int threads, size_t bytes, double budget) {
  const size_t part = bytes / 512 / static_cast<size_t>(threads) * 128;  // floats
  const std::shared_ptr<std::byte> memory = allocate(4 * part * static_cast<size_t>(threads));
  float* const numbers = reinterpret_cast<float*>(memory.get());
  const size_t loops = std::max<size_t>(1, (size_t{8} << 20) / bytes);
  on_threads(threads, [&](int t) { std::fill_n(numbers + static_cast<size_t>(t) * part, part, 1.0f); });
  const Timing t = measure(budget, [&] {
    on_threads(threads, [&](int thread) {
      const float* from = numbers + static_cast<size_t>(thread) * part;
      f32x16 sums[8];
      for (f32x16& s : sums) s = splat(0.0f);
      for (size_t loop = 0; loop < loops; ++loop)
        for (const float* at = from; at < from + part; at += 128)
          for (int i = 0; i < 8; ++i) sums[i] = add(sums[i], load(at + 16 * i));
      for (int i = 1; i < 8; ++i) sums[0] = add(sums[0], sums[i]);
      sink = sum(sums[0]);
    });
  });
  return 4e-9 * static_cast<double>(part * static_cast<size_t>(threads) * loops) / t.median;
}

struct Ceilings {
  int threads;
  double fma_gflops, int8_gops, read_gbs;
};

// ---- rows -----------------------------------------------------------------------------------------------

struct Row {
  std::string what;
  int n = 0, batch = 0;  // tokens a sequence (prefill: computed; decode: of context), sequences
  double seconds = 0, spread = 0;
  double tokens = 0;           // of one measured call
  double flops = 0, int8 = 0;  // operations of one call, in floats and in 8 bits
  double bytes = 0;            // read by one call: each weight and each K, V once
  std::string note = "";
};

/// The least time any code needs on this machine, and what for.
std::pair<double, const char*> bound(const Row& r, const Ceilings& c) {
  const double fma = 1e-9 * r.flops / c.fma_gflops, int8 = 1e-9 * r.int8 / c.int8_gops;
  const double read = 1e-9 * r.bytes / c.read_gbs;
  if (read > fma + int8) return {read, "read"};
  return {fma + int8, int8 > fma ? "int8" : "fma"};  // both run in the same unit
}

struct Bench {
  const Model& model;
  const Tokenizer& tokenizer;
  Ceilings ceilings;
  double budget;  // seconds a row
  double weight_bytes;
  std::vector<Row> rows = {};

  /// Operations of `tokens` rows in the matrices, `wanted` of them as far as the logits.
  void count_matrices(Row& r, double tokens, double wanted) const {
    for (const Layer& l : model.layers)
      for (const Matrix* m : {&l.qkv, &l.attention_out, &l.gate_up, &l.down}) count(r, *m, tokens);
    count(r, model.output(), wanted);
    r.bytes += weight_bytes;
  }
  static void count(Row& r, const Matrix& m, double rows) {
    (m.type == DType::q8_0 ? r.int8 : r.flops) += 2.0 * rows * m.inputs * m.outputs;
  }
  /// Attention over `pairs` pairs of a query token and a position: q k and the weighted sum of v.
  void count_attention(Row& r, double pairs) const {
    const Config& c = model.config;
    r.flops += 4.0 * pairs * c.layers * c.heads * c.head_width;
  }

  void add(Row r, const std::function<void()>& call) {
    progress(r.what + " " + std::to_string(r.n) + " x " + std::to_string(r.batch));
    const Timing t = measure(budget, call);
    r.seconds = t.median, r.spread = t.spread;
    rows.push_back(std::move(r));
  }

  /// A sequence of n tokens as one span, in blocks of 16 from `first_block` on.
  static Span span_of(int n, int first_position, int first_block, int vocabulary) {
    Span s;
    for (int i = 0; i < n; ++i) s.tokens.push_back((first_position + i) * 7919 % vocabulary);
    s.first_position = first_position;
    for (int b = 0; b < (first_position + n + 15) / 16; ++b) s.block_table.push_back(first_block + b);
    s.logits_of = n - 1;
    return s;
  }

  void prefill(int n) {
    Transformer transformer(model, (n + 15) / 16, 16, ceilings.threads);
    StepBatch step;
    step.spans.push_back(span_of(n, 0, 0, model.config.vocabulary));
    Row r{"prefill", n, 1};
    r.tokens = n;
    count_matrices(r, n, 1);
    count_attention(r, 0.5 * n * (n + 1));
    std::vector<float> logits;
    add(r, [&] { transformer.run(step, logits); });
  }

  void decode(int batch, int context) {
    const int blocks = (context + 16) / 16;
    Transformer transformer(model, blocks * batch, 16, ceilings.threads);
    std::vector<float> logits;
    StepBatch step;
    for (int b = 0; b < batch; ++b) {
      StepBatch fill;  // the context, so that K and V are real numbers
      fill.spans.push_back(span_of(context, 0, b * blocks, model.config.vocabulary));
      if (b == 0 || context <= 512) transformer.run(fill, logits);
      step.spans.push_back(span_of(1, context, b * blocks, model.config.vocabulary));
    }
    Row r{"decode", context, batch};
    r.tokens = batch;
    count_matrices(r, batch, batch);
    count_attention(r, static_cast<double>(batch) * (context + 1));
    r.bytes +=
        static_cast<double>(batch) * (context + 1) * static_cast<double>(model.config.kv_bytes_per_token());
    add(r, [&] { transformer.run(step, logits); });
  }

  /// Attention alone, all layers: `queries` rows that see n positions each.
  void attention(const char* what, int queries, int n) {
    const Config& c = model.config;
    const KvShape shape{c.kv_heads, c.head_width, 16};
    const int blocks = (n + 15) / 16, together = c.heads / c.kv_heads, tile = std::max(1, 24 / together);
    const size_t layer = static_cast<size_t>(blocks) * 2 * shape.half();
    std::vector<float> kv(layer * static_cast<size_t>(c.layers)),
        q(static_cast<size_t>(queries * c.heads * c.head_width));
    for (size_t i = 0; i < kv.size(); ++i) kv[i] = random_weight(1, i);
    for (size_t i = 0; i < q.size(); ++i) q[i] = random_weight(2, i);
    std::vector<float> out(q.size());
    std::vector<int> table;
    for (int b = 0; b < blocks; ++b) table.push_back(b);
    Row r{what, n, queries};
    r.tokens = queries;
    count_attention(r, static_cast<double>(queries) * n);
    r.bytes = 4.0 * static_cast<double>(kv.size());
    add(r, [&] {
      on_threads(ceilings.threads, [&](int thread) {
        std::vector<Query> tiles;
        std::vector<float> scratch(static_cast<size_t>(std::max(24, together)) *
                                   static_cast<size_t>((n + 63) / 64 * 64));
        int unit = 0;
        for (int l = 0; l < c.layers; ++l)
          for (int first = 0; first < queries; first += tile)
            for (int g = 0; g < c.kv_heads; ++g, ++unit) {
              if (unit % ceilings.threads != thread) continue;
              tiles.clear();
              for (int t = first; t < std::min(queries, first + tile); ++t)
                for (int h = g * together; h < (g + 1) * together; ++h)
                  tiles.push_back({q.data() + (t * c.heads + h) * c.head_width,
                                   out.data() + (t * c.heads + h) * c.head_width, n});
              paged_attention(tiles.data(), static_cast<int>(tiles.size()), g,
                              kv.data() + static_cast<size_t>(l) * layer, table.data(), shape,
                              scratch.data());
            }
      });
    });
  }

  void tokenize() {
    std::string text;
    for (const Request& r : six_requests()) text += r.system + " " + r.user + "\n";
    Row r{"tokenizer", static_cast<int>(text.size()), 1};
    r.tokens = static_cast<double>(tokenizer.encode(text).size());
    add(r, [&] { sink = static_cast<float>(tokenizer.encode(text).size()); });
    rows.back().note = number("%.1f MB/s", 1e-6 * static_cast<double>(text.size()) / rows.back().seconds);
  }

  /// Decisions and bookkeeping of the continuous batcher at `seats` seats, with a model that costs nothing.
  void scheduler(int seats) {
    struct Nothing final : Executor {
      void run(const StepBatch& step, std::vector<float>& logits) override {
        logits.assign(step.spans.size() * 4, 0.0f);
      }
      int vocabulary() const override { return 4; }
    } nothing;
    std::vector<Request> requests;
    for (int i = 0; i < seats; ++i) {
      Request r;
      for (int t = 0; t < 128; ++t) r.prompt.push_back(1 + (t * 31 + i) % 3);
      r.max_tokens = 128;
      requests.push_back(r);
    }
    double step_us = 0;
    Row r{"scheduler", 128, seats};
    add(r, [&] {
      BlockPool pool(seats * 17, 16);
      ContinuousOptions options;
      options.seats = seats;
      ContinuousBatcher batcher(pool, {1024, 4, 0}, options);
      const RunReport report = serve("scheduler", batcher, nothing, requests);
      step_us = 1e6 * summarize(report).schedule_s / static_cast<double>(report.steps.size());
    });
    const auto step = std::find_if(rows.begin(), rows.end(),
                                   [&](const Row& d) { return d.what == "decode" && d.batch == seats; });
    rows.back().seconds = 1e-6 * step_us;
    rows.back().note = number("%.2f us a step", step_us);
    if (step != rows.end())
      rows.back().note += number(", %.2f %% of a decode step", 1e-4 * step_us / step->seconds);
  }

  static std::string number(const char* format, double x) {
    char text[64];
    std::snprintf(text, sizeof text, format, x);
    return text;
  }
};

// ---- output ---------------------------------------------------------------------------------------------

std::string shown(const Row& r) {
  if (r.what == "prefill") return "prefill " + std::to_string(r.n);
  if (r.what == "decode" && r.n == 128) return "decode, batch " + std::to_string(r.batch);
  if (r.what == "decode") return "decode, context " + std::to_string(r.n);
  if (r.what == "attention") return "attention, 1 query, " + std::to_string(r.n);
  if (r.what == "attention_prefill")
    return "attention, " + std::to_string(r.batch) + " queries, " + std::to_string(r.n);
  return r.what;
}

void print_row(const Row& r, const Ceilings& c) {
  if (r.bytes == 0) {
    std::printf("%-30s%12s%s\n", shown(r).c_str(), "", ("   " + r.note).c_str());
    return;
  }
  const auto [least, name] = bound(r, c);
  std::printf("%-30s%12.0f%12.1f%10.1f%8.1f %% of %-5s%7.1f %%\n", shown(r).c_str(), r.tokens / r.seconds,
              1e-9 * (r.flops + r.int8) / r.seconds, 1e-9 * r.bytes / r.seconds, 100 * least / r.seconds,
              name, 100 * r.spread);
}

std::string report_json(const Bench& b, const std::string& preset, const std::string& type,
                        const std::vector<Ceilings>& all, double memory_gbs) {
  Json j;
  j.begin_object()
      .key("machine")
      .begin_object()
      .field("lanes", std::string(lanes::kName))
      .field("threads", b.ceilings.threads);
  j.field("cores", default_threads()).end_object();
  const auto put = [&](const Ceilings& c) {
    j.field("fma_gflops", c.fma_gflops).field("int8_gops", c.int8_gops).field("read_gbs", c.read_gbs);
  };
  j.key("ceilings").begin_object();
  put(b.ceilings);
  j.field("memory_gbs", memory_gbs).field("weight_bytes", b.weight_bytes).key("by_threads").begin_array();
  for (const Ceilings& c : all) {
    j.begin_object().field("threads", c.threads);
    put(c);
    j.end_object();
  }
  j.end_array().end_object().key("rows").begin_array();
  for (const Row& r : b.rows) {
    const auto [least, name] = bound(r, b.ceilings);
    j.begin_object().field("what", r.what).field("preset", preset).field("type", type).field("n", r.n);
    j.field("batch", r.batch).field("threads", b.ceilings.threads).field("seconds", r.seconds);
    if (r.bytes > 0) {
      j.field("tok_s", r.tokens / r.seconds).field("gflops", 1e-9 * (r.flops + r.int8) / r.seconds);
      j.field("gbs", 1e-9 * r.bytes / r.seconds)
          .field("ceiling", std::string(name))
          .field("of_ceiling", least / r.seconds);
    }
    j.field("spread", r.spread);
    if (!r.note.empty()) j.field("note", r.note);
    j.end_object();
  }
  j.end_array().end_object();
  return j.str();
}

void draw(const std::string& path, const Bench& b, const std::string& what) {
  const Ceilings& c = b.ceilings;
  const bool q8 = b.model.output().type == DType::q8_0;
  Roofline picture{
      "How near to the roof",
      what,
      c.read_gbs,
      q8 ? c.int8_gops : c.fma_gflops,
      Bench::number("reads at %.0f GB/s", c.read_gbs),
      Bench::number(q8 ? "%.0f GOP/s in 8 bits" : "%.0f GFLOP/s", q8 ? c.int8_gops : c.fma_gflops),
      {}};
  for (const Row& r : b.rows)
    if (r.bytes > 0)
      picture.points.push_back({shown(r), (r.flops + r.int8) / r.bytes, 1e-9 * (r.flops + r.int8) / r.seconds,
                                r.what == "prefill"  ? 0
                                : r.what == "decode" ? 1
                                                     : 3});
  write_png(path, draw_roofline(picture));
}

double packed_weight_bytes(const Model& m) {
  double bytes = 0;
  const auto add = [&](const Matrix& w) {
    bytes += static_cast<double>(packed_bytes(w.type, w.outputs, w.inputs));
  };
  for (const Layer& l : m.layers) add(l.qkv), add(l.attention_out), add(l.gate_up), add(l.down);
  add(m.output());
  return bytes;
}

/// The most memory this process has had, in bytes; 0 where the system does not say.
double peak_memory() {
#ifdef SERVELITE_POSIX
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  #ifdef __APPLE__
  return static_cast<double>(usage.ru_maxrss);
  #else
  return 1024.0 * static_cast<double>(usage.ru_maxrss);
  #endif
#else
  return 0;
#endif
}

int run(Options& o) {
  const std::string preset = o.text("preset"), path = o.text("model");
  const bool from_file = !path.empty();
  const double budget = o.real("seconds", 0.001, 600);
  const int threads = o.threads() > 0 ? o.threads() : default_threads();
  std::string type = o.text("type");

  progress("loading");
  const double before = peak_memory(), begin = now();
  Gguf file = from_file ? read_gguf(path) : make_preset(preset, dtype_of(type));
  if (from_file && o.given("type")) file = convert(file, dtype_of(type));
  const double made = now();
  const LoadedModel loaded{read_model(file), Tokenizer(read_vocabulary(file))};
  const double packed = now(), peak = peak_memory();
  if (!o.text("save").empty()) {
    progress("saving");
    write_gguf(o.text("save"), file.metadata, file.tensors);
    progress("");
    std::printf("wrote %s\n", o.text("save").c_str());
    return 0;
  }
  double file_bytes = 0;
  for (const Tensor& t : file.tensors) file_bytes += static_cast<double>(t.bytes);
  file = {};
  const Model& model = loaded.model;
  if (from_file && !o.given("type")) type = find_dtype(model.output().type)->name;
  const double weights = packed_weight_bytes(model);

  const std::string what = (from_file ? path : preset) + ", " + type + ", " +
                           Bench::number("%.1f MB of weights", 1e-6 * weights) + "; " + lanes::kName + ", " +
                           std::to_string(threads) + (threads == 1 ? " thread" : " threads");
  std::printf("%s\n", what.c_str());
  if (from_file)
    std::printf("opened and packed in %.3f s (%.2f GB/s), peak memory %.2f x the file's tensors\n",
                packed - begin, 1e-9 * file_bytes / (packed - begin), (peak - before) / file_bytes);
  else
    std::printf("weights drawn in %.2f s, packed in %.3f s (%.2f GB/s)\n", made - begin, packed - made,
                1e-9 * file_bytes / (packed - made));

  std::printf("\nceilings   threads   fma GFLOP/s   int8 GOP/s   read GB/s (as many bytes as the weights)\n");
  std::vector<Ceilings> all;
  for (int t = 1; t <= threads; t = t < threads && t * 2 > threads ? threads : t * 2) {
    progress("ceilings");
    all.push_back(
        {t, fma_peak(t, budget), int8_peak(t, budget), read_rate(t, static_cast<size_t>(weights), budget)});
    progress("");
    std::printf("%18d%14.1f%13.1f%12.1f\n", t, all.back().fma_gflops, all.back().int8_gops,
                all.back().read_gbs);
  }
  const double memory = read_rate(threads, size_t{1} << 30, budget);
  progress("");
  std::printf("%18d%14s%13s%12.1f   (1 GiB: mostly memory, not cache)\n\n", threads, "", "", memory);

  Bench b{model, loaded.tokenizer, all.back(), budget, weights};
  std::printf("%-30s%12s%12s%10s%21s%9s\n", "", "tokens/s", "GFLOP/s", "GB/s", "of the ceiling", "spread");
  const auto show = [&] {
    progress("");
    print_row(b.rows.back(), b.ceilings);
    std::fflush(stdout);
  };
  for (const int n : {128, 512})
    if (n <= model.config.context) b.prefill(n), show();
  for (const int batch : {1, 2, 4, 8, 16, 32, 64}) b.decode(batch, 128), show();
  const int far = std::min(4096, model.config.context) - 16;
  b.decode(1, far), show();
  b.attention("attention", 1, far), show();
  b.attention("attention_prefill", 64, far), show();
  b.tokenize(), show();
  b.scheduler(32), show();

  const auto write = [&](const char* option, const auto& how) {
    if (o.text(option).empty()) return;
    how(o.text(option));
    std::printf("wrote %s\n", o.text(option).c_str());
  };
  write("json",
        [&](auto& f) { write_file(f, report_json(b, from_file ? path : preset, type, all, memory)); });
  write("png", [&](auto& f) { draw(f, b, what); });
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return run_main("bench", [&] {
    Options o("bench", "prefill, decode and attention against what this machine can do at all");
    o.add("preset", "tiny|110m|1b", "tiny", "a model of this shape with random weights");
    o.add("model", "F", "", "a GGUF file instead");
    o.add("type", "T", "f32", "f32, f16, bf16 or q8_0: the matrices' type (a file's own, if not given)");
    o.add("threads", "N", "0", "threads; 0: all cores");
    o.add("seconds", "X", "0.3", "how long each line is measured, at least");
    o.add("save", "F", "", "write the preset as GGUF, and stop");
    o.add("json", "F", "", "write the table as JSON");
    o.add("png", "F", "", "draw the roofline");
    return o.parse(argc, argv) ? run(o) : 0;
  });
}
