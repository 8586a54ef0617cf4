// eval_tiny: does the model answer? Exact match per family of models/corpus.hpp, on held-out prompts.
//
// Every prompt is served by the continuous batcher, greedily; an answer counts if it is the expected one
// to the letter. Stories are open: what counts there is that they end by themselves.
#include <cstdio>
#include <servelite/json.hpp>
#include <servelite/servelite.hpp>

#include "../examples/cli.hpp"
#include "corpus.hpp"

using namespace servelite;

namespace {

struct Result {
  std::string family;
  bool closed;
  int prompts = 0, right = 0;
};

Result examine(const corpus::FamilyInfo& family, int prompts, uint64_t seed, const LoadedModel& loaded,
               Transformer& executor, int blocks, int block_size, bool show) {
  corpus::Rng rng{seed};
  const std::vector<corpus::EvalItem> items = corpus::make_eval(rng, family.name, prompts);
  std::vector<Request> requests;
  for (const corpus::EvalItem& item : items) {
    Request r;
    r.system = item.system, r.user = item.question;
    r.max_tokens = 450;
    requests.push_back(r);
  }
  BlockPool pool(blocks, block_size);
  const Config& c = loaded.model.config;
  ContinuousOptions options;
  options.seats = 32;
  ContinuousBatcher batcher(pool, {c.context, c.vocabulary, loaded.tokenizer.eos()}, options);
  ServeOptions serve_options;
  serve_options.tokenizer = &loaded.tokenizer;
  const RunReport report = serve(family.name, batcher, executor, requests, serve_options);

  Result result{family.name, family.closed};
  for (size_t i = 0; i < items.size(); ++i) {
    const RequestRecord& r = report.requests[i];
    const bool right = family.closed ? r.text == items[i].answer : r.finish == Finish::eos;
    ++result.prompts;
    result.right += right;
    if (show && !right)
      std::printf("  %s\n    expected: %s\n    found:    %s %s\n", items[i].question.c_str(),
                  items[i].answer.c_str(), r.text.c_str(), r.refusal.c_str());
  }
  return result;
}

}  // namespace

int main(int argc, char** argv) {
  return run_main("eval_tiny", [&] {
    Options o("eval_tiny", "exact-match accuracy per family on held-out prompts");
    o.add("model", "F", SERVELITE_MODEL, "GGUF file");
    o.add("prompts", "N", "400", "prompts per family");
    o.add("seed", "N", "2026", "which prompts");
    o.add("threads", "N", "0", "threads of the forward pass; 0: all cores");
    o.add("show", "", "", "print the wrong answers");
    o.add("json", "F", "", "write the table as JSON");
    if (!o.parse(argc, argv)) return 0;

    const LoadedModel loaded = load_model(o.text("model"));
    const int block_size = 16, blocks = 32 * ((loaded.model.config.context + block_size - 1) / block_size);
    Transformer executor(loaded.model, blocks, block_size, o.threads());
    Json json;
    json.begin_object().field("model", o.text("model")).key("families").begin_array();
    std::printf("%-12s %8s %8s   exact match\n", "family", "closed", "prompts");
    for (const corpus::FamilyInfo& family : corpus::families()) {
      const Result r = examine(family, o.integer("prompts", 1, 100000),
                               static_cast<uint64_t>(o.integer("seed", 0, 1 << 30)), loaded, executor, blocks,
                               block_size, o.flag("show"));
      const double accuracy = static_cast<double>(r.right) / r.prompts;
      std::printf("%-12s %8s %8d   %6.2f %%%s\n", r.family.c_str(), r.closed ? "yes" : "no", r.prompts,
                  100 * accuracy, r.closed ? "" : "  (ended by itself)");
      std::fflush(stdout);
      json.begin_object().field("name", r.family).field("closed", r.closed).field("prompts", r.prompts);
      json.field("accuracy", accuracy).end_object();
    }
    json.end_array().end_object();
    if (!o.text("json").empty()) write_file(o.text("json"), json.str() + "\n");
    return 0;
  });
}
