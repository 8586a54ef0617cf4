// 02_prefill_and_decode: the two phases of an answer, timed, and what the KV cache is for.
//
//   prefill   all prompt tokens in one forward pass: each weight is read once for many tokens
//   decode    one token per pass: each weight is read for a single token
//
// Without a cache every new token would need all earlier ones computed again.
//
// Chapter: docs/02_prefill_and_decode.md
#include <chrono>
#include <cstdio>
#include <servelite/servelite.hpp>

#include "cli.hpp"

using namespace servelite;

namespace {

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Computes tokens[from..] of one sequence and returns the greedy next token.
int step_once(Transformer& transformer, const std::vector<int>& tokens, int from,
              const std::vector<int>& table) {
  StepBatch step;
  step.spans.emplace_back();
  Span& span = step.spans.back();
  span.tokens.assign(tokens.begin() + from, tokens.end());
  span.first_position = from;
  span.block_table = table;
  span.logits_of = static_cast<int>(span.tokens.size()) - 1;
  std::vector<float> logits;
  transformer.run(step, logits);
  return argmax(logits);
}

void show(const std::string& model_path, int threads, int most) {
  const LoadedModel loaded = load_model(model_path);
  const Request request = six_requests().front();
  const std::vector<int> prompt = chat_prompt(loaded.tokenizer, request.system, request.user);
  const int eos = loaded.tokenizer.eos();

  const int context = loaded.model.config.context, asked = static_cast<int>(prompt.size());
  if (asked + 2 > context)
    fail("--model: expected a context of at least ", asked + 2, " tokens, found ", context);
  BlockPool pool((context + 15) / 16, 16);
  Transformer transformer(loaded.model, pool.size(), pool.block_size(), threads);
  std::vector<int> table;
  for (int i = 0; i < pool.size(); ++i) table.push_back(pool.allocate());
  most = std::min(most, context - asked);
  step_once(transformer, prompt, 0, table);  // warm up: threads, caches, page faults

  std::vector<int> tokens = prompt;
  const double begin = seconds();
  tokens.push_back(step_once(transformer, tokens, 0, table));
  const double prefilled = seconds();
  while (tokens.back() != eos && static_cast<int>(tokens.size() - prompt.size()) < most)
    tokens.push_back(step_once(transformer, tokens, static_cast<int>(tokens.size()) - 1, table));
  const double decoded = seconds();

  std::vector<int> again = prompt;  // the same without a cache: every pass starts at position 0
  while (again.size() < tokens.size()) again.push_back(step_once(transformer, again, 0, table));
  const double recomputed = seconds();

  const double n = static_cast<double>(prompt.size()),
               m = static_cast<double>(tokens.size() - prompt.size() - 1);
  const double prefill = prefilled - begin, decode = decoded - prefilled, no_cache = recomputed - decoded;
  std::printf("%s, %d thread%s\n\n", lanes::kName, transformer.threads(),
              transformer.threads() == 1 ? "" : "s");
  std::printf("prefill            %4.0f tokens in   1 pass    %8.2f ms   %8.0f tokens/s\n", n, 1e3 * prefill,
              n / prefill);
  std::printf(
      "decode             %4.0f tokens in %3.0f passes  %8.2f ms   %8.0f tokens/s   %.3f ms a token\n", m, m,
      1e3 * decode, m / decode, 1e3 * decode / m);
  std::printf(
      "decode, no cache   %4.0f tokens in %3.0f passes  %8.2f ms   %8.0f tokens/s   %.1f times as long\n",
      m + 1, m + 1, 1e3 * no_cache, (m + 1) / no_cache, no_cache / (prefill + decode));
  std::printf(
      "\nA token costs %.1f times as much in decode as in prefill: the same weights are read for one row\n"
      "instead of %.0f. Batching is how a server gets that factor back.\n",
      (decode / m) / (prefill / n), n);
  std::printf("Both ways gave the same tokens: %s\n\n%s\n", again == tokens ? "yes" : "NO",
              loaded.tokenizer.decode(std::span(tokens).subspan(prompt.size())).c_str());
}

}  // namespace

int main(int argc, char** argv) {
  return run_main("02_prefill_and_decode", [&] {
    Options o("02_prefill_and_decode", "the two phases of an answer, timed, with and without a KV cache");
    o.add("model", "F", SERVELITE_MODEL, "GGUF file");
    o.add("threads", "N", "0", "threads of the forward pass; 0: all cores");
    o.add("max-tokens", "N", "200", "tokens to generate at most");
    if (o.parse(argc, argv)) show(o.text("model"), o.threads(), o.integer("max-tokens", 2, 100000));
    return 0;
  });
}
