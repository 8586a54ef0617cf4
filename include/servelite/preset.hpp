// preset.hpp: models with the shape of real ones and random weights, made in memory. Outer circle.
//
// How fast a model runs depends on its shape, not on what it learned. So that nothing has to be downloaded to
// measure a 100-million or a billion parameter model, its weights are drawn here, the same on every machine.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gguf.hpp"
#include "gguf_write.hpp"
#include "machine.hpp"
#include "model.hpp"

namespace servelite {

/// The presets' names: the shipped model's shape, that of GPT-2 small, that of TinyLlama.
inline constexpr std::array<const char*, 3> kPresets = {"tiny", "110m", "1b"};

/// Their shapes. The context is 8,192 for all, so that long contexts can be measured.
inline Config preset_config(const std::string& name) {
  Config c;
  if (name == "tiny")
    c = {192, 4, 6, 2, 32, 384, 768, 8192};
  else if (name == "110m")
    c = {768, 12, 12, 12, 64, 2048, 32000, 8192};
  else if (name == "1b")
    c = {2048, 22, 32, 4, 64, 5632, 32000, 8192};
  else
    fail("preset: expected tiny, 110m or 1b, found '", name, "'");
  return c;
}

/// Weights of the matrices that one token passes through; the embedding look-up is none.
inline int64_t matrix_weights(const Config& c, bool with_output = true) {
  const int64_t d = c.width, q = int64_t{c.heads} * c.head_width;
  const int64_t layer = d * c.qkv_width() + q * d + 3 * d * c.feed_forward;
  return c.layers * layer + (with_output ? d * c.vocabulary : 0);
}

/// The random number of (tensor, index): splitmix64's mixer, uniform in [-1, 1).
inline float random_weight(uint64_t tensor, uint64_t index) {
  uint64_t z = (tensor << 40) + (index + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
  z = (z ^ z >> 27) * 0x94D049BB133111EBu;
  return static_cast<float>(static_cast<int32_t>((z ^ z >> 31) >> 32)) * 0x1p-31f;
}

/// A SentencePiece-style vocabulary of n >= 259 + 96 ids without a text behind it: the byte tokens, the
/// printable characters, then pieces of two and three letters. It cuts English into pieces of about two
/// letters.
inline void add_preset_vocabulary(Metadata& metadata, int n) {
  std::vector<std::string> pieces = {"<unk>", "<s>", "</s>"};
  std::vector<int32_t> types = {2, 3, 3};
  const auto add = [&](const std::string& piece, int32_t type) {
    if (static_cast<int>(pieces.size()) < n) pieces.push_back(piece), types.push_back(type);
  };
  for (int b = 0; b < 256; ++b) {
    constexpr const char* hex = "0123456789ABCDEF";
    add(std::string("<0x") + hex[b / 16] + hex[b % 16] + ">", 6);
  }
  const std::string space = "\xE2\x96\x81";  // U+2581, SentencePiece's mark for a space
  add(space, 1);
  for (char c = '!'; c <= '~'; ++c) add(std::string(1, c), 1);
  std::vector<std::string> starts = {space};
  for (char c = 'a'; c <= 'z'; ++c) starts.push_back(std::string(1, c));
  for (const std::string& a : starts)
    for (char b = 'a'; b <= 'z'; ++b) add(a + b, 1);
  for (const std::string& a : starts)
    for (char b = 'a'; b <= 'z'; ++b)
      for (char c = 'a'; c <= 'z'; ++c) add(a + b + c, 1);
  for (int i = 0; static_cast<int>(pieces.size()) < n; ++i)
    add("<extra" + std::to_string(i) + ">", 5);  // unused
  std::vector<float> scores;
  for (size_t i = 0; i < pieces.size(); ++i) scores.push_back(-static_cast<float>(i));
  metadata.emplace_back("tokenizer.ggml.model", std::string("llama"));
  metadata.emplace_back("tokenizer.ggml.tokens", std::move(pieces));
  metadata.emplace_back("tokenizer.ggml.scores", std::move(scores));
  metadata.emplace_back("tokenizer.ggml.token_type", std::move(types));
  metadata.emplace_back("tokenizer.ggml.bos_token_id", uint32_t{1});
  metadata.emplace_back("tokenizer.ggml.eos_token_id", uint32_t{2});
  metadata.emplace_back("tokenizer.ggml.unknown_token_id", uint32_t{0});
}

/// A whole model as a GGUF in memory: write_gguf() saves it, read_model() loads it. Matrices are of `type`,
/// their numbers uniform with variance 1 / inputs, so that activations keep their size.
inline Gguf make_preset(const std::string& name, DType type) {
  const Config c = preset_config(name);
  Gguf file;
  file.name = "preset " + name;
  const auto set = [&](const char* key, auto value) { file.metadata.emplace_back(key, value); };
  set("general.architecture", std::string("llama"));
  set("general.name", "servelite preset " + name);
  set("llama.context_length", static_cast<uint32_t>(c.context));
  set("llama.embedding_length", static_cast<uint32_t>(c.width));
  set("llama.block_count", static_cast<uint32_t>(c.layers));
  set("llama.feed_forward_length", static_cast<uint32_t>(c.feed_forward));
  set("llama.attention.head_count", static_cast<uint32_t>(c.heads));
  set("llama.attention.head_count_kv", static_cast<uint32_t>(c.kv_heads));
  set("llama.attention.layer_norm_rms_epsilon", c.norm_eps);
  set("llama.rope.dimension_count", static_cast<uint32_t>(c.head_width));
  set("llama.rope.freq_base", static_cast<float>(c.rope_base));
  add_preset_vocabulary(file.metadata, c.vocabulary);

  auto memory = std::make_shared<std::vector<std::shared_ptr<std::byte>>>();
  file.bytes = memory;
  const auto add = [&](const std::string& tensor, int rows, int inputs) {
    const DType stored = rows == 1 ? DType::f32 : type;
    const uint64_t r = static_cast<uint64_t>(rows), k = static_cast<uint64_t>(inputs);
    Tensor t =
        make_tensor(tensor + ".weight", stored, rows == 1 ? std::vector{k} : std::vector{k, r}, nullptr);
    memory->push_back(allocate(static_cast<size_t>(t.bytes)));
    std::byte* out = memory->back().get();
    t.data = out;
    const float size = std::sqrt(3.0f / static_cast<float>(inputs));
    SERVELITE_OMP(omp parallel for)
    for (int row = 0; row < rows; ++row) {
      std::vector<float> x(static_cast<size_t>(inputs), 1.0f);  // norms are all ones
      for (int i = 0; i < inputs && rows > 1; ++i)
        x[static_cast<size_t>(i)] = size * random_weight(file.tensors.size(), static_cast<uint64_t>(row) * k +
                                                                                  static_cast<uint64_t>(i));
      quantize(stored, x.data(), x.size(), out + static_cast<size_t>(row) * static_cast<size_t>(t.bytes / r));
    }
    file.tensors.push_back(std::move(t));
  };
  const int D = c.width, E = c.head_width, F = c.feed_forward;
  add("token_embd", c.vocabulary, D);
  for (int l = 0; l < c.layers; ++l) {
    const std::string blk = "blk." + std::to_string(l) + ".";
    add(blk + "attn_norm", 1, D), add(blk + "attn_q", c.heads * E, D);
    add(blk + "attn_k", c.kv_heads * E, D), add(blk + "attn_v", c.kv_heads * E, D);
    add(blk + "attn_output", D, c.heads * E), add(blk + "ffn_norm", 1, D);
    add(blk + "ffn_gate", F, D), add(blk + "ffn_up", F, D), add(blk + "ffn_down", D, F);
  }
  add("output_norm", 1, D);
  if (name == "1b") add("output", c.vocabulary, D);
  return file;
}

}  // namespace servelite
