// recipe.hpp: how the shipped model is made: its shape, its data stream, its schedule, its checkpoints.
//
// A run is a function of the recipe alone. Everything random comes from one seed, and train.hpp computes
// the same bits on any number of threads; so the same recipe gives the same file, byte for byte, also when
// the run was interrupted and resumed from a checkpoint.
#pragma once

#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <servelite/files.hpp>
#include <servelite/gguf_write.hpp>
#include <servelite/tokenizer.hpp>
#include <string>
#include <utility>
#include <vector>

#include "bpe_train.hpp"
#include "corpus.hpp"
#include "train.hpp"

namespace servelite::train {

struct Recipe {
  Shape shape;
  uint64_t seed = 1;
  int steps = 4000;
  int batch = 3072;         // tokens of a step, at least; a conversation is never cut
  float rate = 2e-3f;       // the peak, reached after `warmup` steps, followed by half a cosine ...
  float last_rate = 0.02f;  // ... down to this part of it
  int warmup = 100;
  double short_part = 0.25;     // of the steps, in which system prompts are short: copying is learnt sooner
  float rest_weight = 0.05f;    // weight of a token that is not part of an answer
  int whole_answer = 16;        // an answer of more tokens weighs as much as one of this many
  int vocabulary_texts = 3000;  // conversations from which the vocabulary is learnt
};

/// The vocabulary of a recipe.
inline Vocabulary make_vocabulary(const Recipe& r) {
  corpus::Rng rng{r.seed ^ 0x766f636162756c61ull};
  std::vector<std::string> texts;
  for (int i = 0; i < r.vocabulary_texts; ++i) {
    const corpus::Conversation c = corpus::make_conversation(rng);
    texts.push_back(c.system);
    for (const corpus::Turn& turn : c.turns) texts.push_back(turn.question), texts.push_back(turn.answer);
  }
  return train_bpe(texts, r.shape.vocabulary);
}

/// One conversation as ids, each with the weight of being predicted.
inline void append_conversation(Batch& batch, const corpus::Conversation& c, const Tokenizer& tokenizer,
                                const Recipe& r) {
  std::vector<int> ids = {tokenizer.bos()};
  std::vector<float> weights = {0};
  const auto turn = [&](const char* role, const std::string& text, bool answer) {
    const std::vector<int> words = tokenizer.encode(text);
    const float weight = !answer
                             ? r.rest_weight
                             : std::max(r.rest_weight, std::min(1.0f, static_cast<float>(r.whole_answer) /
                                                                          static_cast<float>(words.size())));
    ids.push_back(tokenizer.id_of(role)), weights.push_back(r.rest_weight);
    ids.insert(ids.end(), words.begin(), words.end()), weights.insert(weights.end(), words.size(), weight);
    ids.push_back(tokenizer.eos()), weights.push_back(answer ? 1.0f : r.rest_weight);
  };
  if (!c.system.empty()) turn("<|system|>", c.system, false);
  for (const corpus::Turn& t : c.turns)
    turn("<|user|>", t.question, false), turn("<|assistant|>", t.answer, true);
  if (static_cast<int>(ids.size()) > r.shape.context) return;
  const size_t n = ids.size();
  batch.tokens.insert(batch.tokens.end(), ids.begin(), ids.end());
  for (size_t i = 0; i < n; ++i) {  // position i is to predict token i + 1; the last one, nothing
    batch.targets.push_back(i + 1 < n ? ids[i + 1] : 0);
    batch.weights.push_back(i + 1 < n ? weights[i + 1] : 0.0f);
  }
  batch.first.push_back(batch.size());
}

/// A run in progress.
class Run {
 public:
  Recipe recipe;
  Vocabulary vocabulary;
  Trainer trainer;
  int step = 0;
  int64_t tokens = 0;

  Run(const Recipe& r, int threads)
      : recipe(r),
        vocabulary(make_vocabulary(r)),
        trainer(r.shape, r.seed, threads),
        tokenizer_(vocabulary),
        rng_{r.seed} {}

  /// One step; returns its loss.
  Trainer::Loss advance() {
    corpus::Options options;
    if (step < recipe.short_part * recipe.steps) {
      options.min_tokens = 60, options.max_tokens = 250;
      options.min_system = 20, options.max_system = 100;
    }
    batch_ = {};
    batch_.first.push_back(0);
    for (int tries = 0; batch_.size() < recipe.batch; ++tries) {
      if (tries > recipe.batch)
        fail("recipe: expected conversations that fit a context of ", recipe.shape.context);
      append_conversation(batch_, corpus::make_conversation(rng_, options), tokenizer_, recipe);
    }
    const Trainer::Loss loss = trainer.run(batch_);
    adam_.step(trainer.layout, trainer.parameters, trainer.gradients, rate(), trainer.threads);
    tokens += batch_.size();
    ++step;
    return loss;
  }

  /// Warm-up, then half a cosine.
  float rate() const {
    if (step < recipe.warmup)
      return recipe.rate * static_cast<float>(step + 1) / static_cast<float>(recipe.warmup);
    const double part = static_cast<double>(step) / recipe.steps;
    const double wave = std::fma(sincos64(3.14159265358979 * part).cos, 0.5, 0.5);
    const double last = static_cast<double>(recipe.last_rate);
    return static_cast<float>(static_cast<double>(recipe.rate) * std::fma(1.0 - last, wave, last));
  }

  // ---- checkpoints: a header, then parameters and both moments ------------------------------------

  void save(const std::string& path) {
    adam_.mean.resize(trainer.parameters.size()), adam_.square.resize(trainer.parameters.size());
    const Header h = header();
    std::string bytes(reinterpret_cast<const char*>(&h), sizeof h);
    for (const std::vector<float>* part : {&trainer.parameters, &adam_.mean, &adam_.square})
      bytes.append(reinterpret_cast<const char*>(part->data()), part->size() * sizeof(float));
    write_file(path, bytes);
  }

  /// Goes on where a checkpoint of the same recipe stopped.
  void load(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    const std::string bytes((std::istreambuf_iterator<char>(in)), {});
    const size_t part = trainer.parameters.size() * sizeof(float);
    Header h{};
    if (bytes.size() != sizeof h + 3 * part)
      fail(path, ": expected a checkpoint of ", sizeof h + 3 * part, " bytes, found ", bytes.size());
    std::memcpy(&h, bytes.data(), sizeof h);
    if (h.recipe != header().recipe)
      fail(path, ": expected a checkpoint of this recipe, found one of another");
    step = static_cast<int>(h.step), tokens = h.tokens, rng_.state = h.rng;
    adam_.power1 = h.power1, adam_.power2 = h.power2;
    const char* from = bytes.data() + sizeof h;
    for (std::vector<float>* to : {&trainer.parameters, &adam_.mean, &adam_.square}) {
      to->resize(trainer.parameters.size());
      std::memcpy(to->data(), from, part);
      from += part;
    }
  }

  // ---- the model file -----------------------------------------------------------------------------

  void write_model(const std::string& path) const {
    const Shape& s = trainer.s;
    const auto u32 = [](int n) { return Value(static_cast<uint32_t>(n)); };
    std::vector<int32_t> types;
    for (const TokenType t : vocabulary.types) types.push_back(static_cast<int32_t>(t));
    const Metadata metadata = {
        {"general.architecture", Value(std::string("llama"))},
        {"general.name", Value(std::string("servelite-tiny"))},
        {"general.license", Value(std::string("mit"))},
        {"general.file_type", u32(0)},
        {"llama.vocab_size", u32(s.vocabulary)},
        {"llama.context_length", u32(s.context)},
        {"llama.embedding_length", u32(s.width)},
        {"llama.block_count", u32(s.layers)},
        {"llama.feed_forward_length", u32(s.feed_forward)},
        {"llama.attention.head_count", u32(s.heads)},
        {"llama.attention.head_count_kv", u32(s.kv_heads)},
        {"llama.attention.layer_norm_rms_epsilon", Value(s.norm_eps)},
        {"llama.rope.dimension_count", u32(s.head_width)},
        {"llama.rope.freq_base", Value(static_cast<float>(s.rope_base))},
        {"tokenizer.ggml.model", Value(std::string("llama"))},
        {"tokenizer.ggml.pre", Value(std::string("default"))},
        {"tokenizer.ggml.tokens", Value(vocabulary.tokens)},
        {"tokenizer.ggml.scores", Value(vocabulary.scores)},
        {"tokenizer.ggml.token_type", Value(types)},
        {"tokenizer.ggml.bos_token_id", u32(vocabulary.bos)},
        {"tokenizer.ggml.eos_token_id", u32(vocabulary.eos)},
        {"tokenizer.ggml.unknown_token_id", u32(vocabulary.unk)},
        {"tokenizer.ggml.add_bos_token", Value(vocabulary.add_bos)},
        {"tokenizer.ggml.add_eos_token", Value(false)},
        {"tokenizer.ggml.add_space_prefix", Value(vocabulary.add_space_prefix)},
        {"tokenizer.chat_template", Value(std::string(kChatTemplate))},
    };
    // The rotary pairs are neighbours in training too, as GGUF's "llama" wants them: nothing to permute.
    std::vector<Tensor> tensors;
    for (const Layout::Tensor& t : trainer.layout.tensors) {
      std::vector<uint64_t> dims = {static_cast<uint64_t>(t.columns)};
      if (t.rows > 1) dims.push_back(static_cast<uint64_t>(t.rows));
      tensors.push_back(make_tensor(t.name, DType::f32, dims, trainer.parameters.data() + t.at));
    }
    write_gguf(path, metadata, tensors);
  }

 private:
  struct Header {
    uint64_t recipe;
    int64_t step, tokens;
    uint64_t rng;
    double power1, power2;
  };
  Header header() const {
    const Shape& s = recipe.shape;
    const double numbers[] = {double(s.vocabulary),
                              double(s.width),
                              double(s.layers),
                              double(s.heads),
                              double(s.kv_heads),
                              double(s.head_width),
                              double(s.feed_forward),
                              double(s.context),
                              double(recipe.steps),
                              double(recipe.batch),
                              double(recipe.rate),
                              double(recipe.last_rate),
                              double(recipe.warmup),
                              recipe.short_part,
                              double(recipe.rest_weight),
                              double(recipe.whole_answer),
                              double(recipe.vocabulary_texts)};
    uint64_t hash = recipe.seed;
    for (const double n : numbers) {
      uint64_t bits;
      std::memcpy(&bits, &n, 8);
      hash = corpus::mix(hash ^ bits);
    }
    return {hash, step, tokens, rng_.state, adam_.power1, adam_.power2};
  }

  Tokenizer tokenizer_;
  corpus::Rng rng_;
  Adam adam_;
  Batch batch_;
};

}  // namespace servelite::train
