// 01_one_token: what a language model does, once. Text becomes ids, ids become one logit for each token
// of the vocabulary, and the highest logit is the next token. Everything else is repetition.
//
// Chapter: docs/01_one_token.md
#include <cstdio>
#include <servelite/servelite.hpp>

#include "cli.hpp"

using namespace servelite;

namespace {

/// A token's text as one sees it: blanks and control characters made visible.
std::string shown(const Tokenizer& tokenizer, int id, const Vocabulary& vocabulary) {
  std::string text;
  for (const char c : tokenizer.piece(id)) text += c == ' ' ? '_' : c < ' ' ? '?' : c;
  return text.empty() ? vocabulary.tokens[static_cast<size_t>(id)] : text;
}

void show(const std::string& model_path, const std::string& question) {
  const LoadedModel loaded = load_model(model_path);
  const Tokenizer& tokenizer = loaded.tokenizer;
  const Vocabulary& vocabulary = tokenizer.vocabulary();

  const std::vector<int> ids = chat_prompt(tokenizer, "", question);
  const int n = static_cast<int>(ids.size()), context = loaded.model.config.context;
  if (n > context) fail("--question: expected at most ", context, " tokens, found ", n);
  std::printf("text     %s\nids     ", printable(question).c_str());
  for (const int id : ids) std::printf(" %d", id);
  std::printf("\npieces  ");
  for (const int id : ids) std::printf(" %s", shown(tokenizer, id, vocabulary).c_str());
  std::printf("\n         (a question stands between markers that say whose turn it is; _ is a blank)\n");

  // One forward pass over all of it: one span, in as many blocks of 16 tokens as it needs.
  BlockPool pool((n + 15) / 16, 16);
  Transformer transformer(loaded.model, pool.size(), pool.block_size());
  Span span;
  span.tokens = ids;
  span.logits_of = n - 1;  // what comes after the last token
  for (int i = 0; i < pool.size(); ++i) span.block_table.push_back(pool.allocate());
  StepBatch step;
  step.spans.push_back(span);
  std::vector<float> logits;
  transformer.run(step, logits);

  std::printf("\nlogits   %zu numbers, one for each token of the vocabulary. The five highest:\n",
              logits.size());
  SamplingParams all;
  all.temperature = 1;
  const std::vector<Candidate> likeliest = candidates(logits, all);
  for (size_t i = 0; i < 5; ++i)
    std::printf("         %-16s logit %8.3f   probability %6.2f %%\n",
                shown(tokenizer, likeliest[i].id, vocabulary).c_str(),
                static_cast<double>(logits[static_cast<size_t>(likeliest[i].id)]),
                100 * likeliest[i].probability);
  std::printf(
      "\ntoken    %s. Put it behind the prompt and do the same again, and again, until the model says\n"
      "         %s. That is decoding: 02_prefill_and_decode.\n",
      shown(tokenizer, sample(logits, {}, 0), vocabulary).c_str(),
      vocabulary.tokens[static_cast<size_t>(tokenizer.eos())].c_str());
}

}  // namespace

int main(int argc, char** argv) {
  return run_main("01_one_token", [&] {
    Options o("01_one_token", "text to ids to logits to the next token");
    o.add("model", "F", SERVELITE_MODEL, "GGUF file");
    o.add("question", "TEXT", "What is the opposite of hot?", "what to ask");
    if (o.parse(argc, argv)) show(o.text("model"), o.text("question"));
    return 0;
  });
}
