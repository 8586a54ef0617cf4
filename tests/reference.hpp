// reference.hpp: a Llama that is obviously right, to compare the fast one with.
//
// Double precision, weights as they lie in the file (one row per output), no cache, no batch, no SIMD: for a
// list of tokens everything is computed from the beginning, position by position. Read it beside kernels.hpp
// and transformer.hpp: the same steps in the same order, each in its plainest form.
//
//   kernels.hpp             here
//   matmul                  times
//   rmsnorm                 normed
//   rope, rope_table        rotate
//   swiglu                  silu, in reference_logits
//   paged_attention         attend
//
// Below it: small random models as GGUF files, for all tests that need one.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <servelite/gguf_write.hpp>
#include <string>
#include <vector>

namespace servelite::test {

using Row = std::vector<double>;
using Rows = std::vector<Row>;  // a matrix [outputs x inputs], or one row per position

struct ReferenceLayer {
  Row attention_norm, ff_norm;        // [D]
  Rows q, k, v, out, gate, up, down;  // [HE x D] [GE x D] [GE x D] [D x HE] [F x D] [F x D] [D x F]
};

struct ReferenceLlama {
  int heads = 0, kv_heads = 0, head_width = 0;  // H, G, E
  double eps = 0, rope_base = 0;
  Rows embedding, output;  // [V x D]
  Row output_norm;         // [D]
  std::vector<ReferenceLayer> layers;
};

/// W x: output o is the sum of W[o][i] x[i].
inline Row times(const Rows& w, const Row& x) {
  Row y(w.size());
  for (size_t o = 0; o < w.size(); ++o)
    for (size_t i = 0; i < x.size(); ++i) y[o] += w[o][i] * x[i];
  return y;
}

/// x / sqrt(mean of squares + eps), times the weight.
inline Row normed(Row x, const Row& weight, double eps) {
  double squares = 0;
  for (const double v : x) squares += v * v;
  const double root = std::sqrt(squares / static_cast<double>(x.size()) + eps);
  for (size_t i = 0; i < x.size(); ++i) x[i] = x[i] / root * weight[i];
  return x;
}

/// Rotates every pair (2i, 2i + 1) of every head of x by position * base^(-2i / E).
inline void rotate(Row& x, int position, int head_width, double base) {
  for (size_t at = 0; at < x.size(); at += 2) {
    const double i = static_cast<double>(at % static_cast<size_t>(head_width)) / 2;
    const double angle = position * std::pow(base, -2 * i / head_width);
    const double a = x[at], b = x[at + 1];
    x[at] = a * std::cos(angle) - b * std::sin(angle);
    x[at + 1] = a * std::sin(angle) + b * std::cos(angle);
  }
}

/// One position's attention over the positions so far: query head h looks at KV head h / (H / G).
inline Row attend(const ReferenceLlama& m, const Row& q, const Rows& keys, const Rows& values) {
  const size_t E = static_cast<size_t>(m.head_width), H = static_cast<size_t>(m.heads);
  const size_t together = H / static_cast<size_t>(m.kv_heads);
  Row out(H * E);
  for (size_t h = 0; h < H; ++h) {
    const size_t q_at = h * E, kv_at = h / together * E;
    Row weight(keys.size());
    double total = 0;
    for (size_t p = 0; p < keys.size(); ++p) {
      double dot = 0;
      for (size_t e = 0; e < E; ++e) dot += q[q_at + e] * keys[p][kv_at + e];
      weight[p] = std::exp(dot / std::sqrt(static_cast<double>(E)));
      total += weight[p];
    }
    for (size_t p = 0; p < keys.size(); ++p)
      for (size_t e = 0; e < E; ++e) out[q_at + e] += weight[p] / total * values[p][kv_at + e];
  }
  return out;
}

/// The logits of all positions: [tokens x V].
inline Rows reference_logits(const ReferenceLlama& m, const std::vector<int>& tokens) {
  const auto add = [](Row& x, const Row& y) {
    for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
  };
  Rows x;  // [tokens x D]
  for (const int t : tokens) x.push_back(m.embedding[static_cast<size_t>(t)]);

  for (const ReferenceLayer& w : m.layers) {
    Rows keys, values;
    for (size_t p = 0; p < x.size(); ++p) {
      const Row norm = normed(x[p], w.attention_norm, m.eps);
      Row q = times(w.q, norm);
      keys.push_back(times(w.k, norm));
      values.push_back(times(w.v, norm));
      rotate(q, static_cast<int>(p), m.head_width, m.rope_base);
      rotate(keys[p], static_cast<int>(p), m.head_width, m.rope_base);
      add(x[p], times(w.out, attend(m, q, keys, values)));  // keys and values hold positions 0..p: causal
    }
    for (Row& row : x) {
      const Row norm = normed(row, w.ff_norm, m.eps);
      Row gate = times(w.gate, norm);
      const Row up = times(w.up, norm);
      for (size_t i = 0; i < gate.size(); ++i) gate[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
      add(row, times(w.down, gate));
    }
  }
  for (Row& row : x) row = times(m.output, normed(row, m.output_norm, m.eps));
  return x;
}

inline ReferenceLlama reference_from(const Gguf& file) {
  const auto number = [&](const char* key) {
    return static_cast<int>(file.get_u32(std::string("llama.") + key));
  };
  const auto matrix = [&](const std::string& name) {
    const Tensor& t = file.tensor(name + ".weight");
    std::vector<float> plain(t.elements());
    dequantize(t, plain.data());
    Rows rows;
    for (size_t at = 0; at < plain.size(); at += t.dims[0])
      rows.emplace_back(plain.begin() + static_cast<ptrdiff_t>(at),
                        plain.begin() + static_cast<ptrdiff_t>(at + t.dims[0]));
    return rows;
  };
  ReferenceLlama m;
  m.heads = number("attention.head_count"), m.kv_heads = number("attention.head_count_kv");
  m.head_width = number("attention.key_length");
  m.eps = file.get_f32("llama.attention.layer_norm_rms_epsilon");
  m.rope_base = file.get_f32("llama.rope.freq_base", 10000.0f);
  m.embedding = matrix("token_embd");
  m.output = file.find_tensor("output.weight") ? matrix("output") : m.embedding;
  m.output_norm = matrix("output_norm")[0];
  for (int l = 0; l < number("block_count"); ++l) {
    const std::string blk = "blk." + std::to_string(l) + ".";
    m.layers.push_back({matrix(blk + "attn_norm")[0], matrix(blk + "ffn_norm")[0], matrix(blk + "attn_q"),
                        matrix(blk + "attn_k"), matrix(blk + "attn_v"), matrix(blk + "attn_output"),
                        matrix(blk + "ffn_gate"), matrix(blk + "ffn_up"), matrix(blk + "ffn_down")});
  }
  return m;
}

// ---- small random models ----------------------------------------------------------------------------

struct Shape {
  int width = 32, layers = 2, heads = 2, kv_heads = 1, head_width = 16;  // D, L, H, G, E
  int feed_forward = 48, vocabulary = 263, context = 160;                // F, V (at least 263), positions
  bool tied = false;
  float rope_base = 10000.0f;
  unsigned seed = 1;
};

/// A model file before it is written, so that a test can damage it first.
struct Parts {
  struct Plain {
    std::string name;
    std::vector<uint64_t> dims;
    std::vector<float> values;
  };
  Metadata metadata;
  std::vector<Plain> tensors;

  Value& key(const std::string& name) {
    for (auto& [k, value] : metadata)
      if (k == name) return value;
    fail("the test names a key that is not there: ", name);
  }
  Plain& tensor(const std::string& name) {
    for (Plain& t : tensors)
      if (t.name == name) return t;
    fail("the test names a tensor that is not there: ", name);
  }
};

/// 0 <unk>, 1 <s>, 2 </s>, 3 to 5 the roles, 6 <|end|>, then the 256 bytes, then words nobody says.
inline void add_vocabulary(Metadata& metadata, int size) {
  std::vector<std::string> tokens = {"<unk>",    "<s>",           "</s>",   "<|system|>",
                                     "<|user|>", "<|assistant|>", "<|end|>"};
  std::vector<int32_t> types = {2, 3, 3, 3, 3, 3, 3};
  const char* digits = "0123456789ABCDEF";
  for (int b = 0; b < 256; ++b) {
    tokens.push_back(std::string("<0x") + digits[b / 16] + digits[b % 16] + ">");
    types.push_back(6);
  }
  while (static_cast<int>(tokens.size()) < size)
    tokens.push_back("word" + std::to_string(tokens.size())), types.push_back(1);
  metadata.emplace_back("tokenizer.ggml.model", std::string("llama"));
  metadata.emplace_back("tokenizer.ggml.scores", std::vector<float>(tokens.size(), 0.0f));
  metadata.emplace_back("tokenizer.ggml.tokens", std::move(tokens));
  metadata.emplace_back("tokenizer.ggml.token_type", std::move(types));
  metadata.emplace_back("tokenizer.ggml.bos_token_id", uint32_t{1});
  metadata.emplace_back("tokenizer.ggml.eos_token_id", uint32_t{6});
  metadata.emplace_back("tokenizer.ggml.unknown_token_id", uint32_t{0});
  metadata.emplace_back("tokenizer.ggml.add_bos_token", true);
  metadata.emplace_back("tokenizer.ggml.add_space_prefix", false);
}

inline Parts random_model(const Shape& s) {
  Parts parts;
  parts.metadata.emplace_back("general.architecture", std::string("llama"));
  const auto number = [&](const char* key, int value) {
    parts.metadata.emplace_back(std::string("llama.") + key, static_cast<uint32_t>(value));
  };
  number("context_length", s.context), number("embedding_length", s.width), number("block_count", s.layers);
  number("feed_forward_length", s.feed_forward), number("attention.head_count", s.heads);
  number("attention.head_count_kv", s.kv_heads), number("attention.key_length", s.head_width);
  number("attention.value_length", s.head_width), number("rope.dimension_count", s.head_width);
  parts.metadata.emplace_back("llama.attention.layer_norm_rms_epsilon", 1e-5f);
  parts.metadata.emplace_back("llama.rope.freq_base", s.rope_base);
  add_vocabulary(parts.metadata, s.vocabulary);

  std::mt19937 random(s.seed);
  const auto uniform = [&] { return static_cast<float>(random()) * 0x1p-31f - 1.0f; };  // -1 to 1
  const auto matrix = [&](const std::string& name, int outputs, int inputs, float size) {
    Parts::Plain t{name + ".weight", {static_cast<uint64_t>(inputs), static_cast<uint64_t>(outputs)}, {}};
    for (int i = 0; i < outputs * inputs; ++i) t.values.push_back(size * uniform());
    parts.tensors.push_back(std::move(t));
  };
  const auto vector = [&](const std::string& name) {
    Parts::Plain t{name + ".weight", {static_cast<uint64_t>(s.width)}, {}};
    for (int i = 0; i < s.width; ++i) t.values.push_back(1.0f + 0.3f * uniform());
    parts.tensors.push_back(std::move(t));
  };
  // Sizes that keep every activation near 1, queries and keys a little above so that attention is not even.
  const auto size = [](int inputs) { return std::sqrt(3.0f / static_cast<float>(inputs)); };
  const int D = s.width, HE = s.heads * s.head_width, GE = s.kv_heads * s.head_width, F = s.feed_forward;
  matrix("token_embd", s.vocabulary, D, 1.7f);
  for (int l = 0; l < s.layers; ++l) {
    const std::string blk = "blk." + std::to_string(l) + ".";
    vector(blk + "attn_norm"), vector(blk + "ffn_norm");
    matrix(blk + "attn_q", HE, D, 1.5f * size(D)), matrix(blk + "attn_k", GE, D, 1.5f * size(D));
    matrix(blk + "attn_v", GE, D, size(D)), matrix(blk + "attn_output", D, HE, size(HE));
    matrix(blk + "ffn_gate", F, D, size(D)), matrix(blk + "ffn_up", F, D, size(D));
    matrix(blk + "ffn_down", D, F, 2 * size(F));
  }
  vector("output_norm");
  if (!s.tied) matrix("output", s.vocabulary, D, 2 * size(D));
  return parts;
}

/// The file's bytes, through the library's own writer.
inline std::vector<std::byte> bytes_of(const Parts& parts) {
  std::vector<Tensor> tensors;
  for (const Parts::Plain& t : parts.tensors)
    tensors.push_back(make_tensor(t.name, DType::f32, t.dims, t.values.data()));
  return gguf_bytes(parts.metadata, tensors, "test.gguf");
}

/// The opened file. It owns its bytes.
inline Gguf file_of(const Parts& parts) {
  const auto bytes = std::make_shared<const std::vector<std::byte>>(bytes_of(parts));
  Gguf file = parse_gguf(*bytes, "test.gguf");
  file.bytes = bytes;
  return file;
}
inline Gguf file_of(const Shape& shape) { return file_of(random_model(shape)); }

}  // namespace servelite::test
