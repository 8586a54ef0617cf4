// model.hpp: the configuration and the weights of a Llama-style decoder, packed for the kernels.
//
// load_model() reads a GGUF file (architecture "llama"), checks every shape against the configuration,
// and packs each matrix once into the panels of kernels.hpp. Matrices that are applied to the same input
// are packed as one: q, k and v; gate and up. After loading, the file is not needed any more.
//
// Letters: D width, H query heads, G KV heads, E head width, F feed-forward width, V vocabulary, L layers.
//
// Chapter: docs/01_one_token.md
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gguf.hpp"
#include "kernels.hpp"
#include "tokenizer.hpp"

namespace servelite {

struct Config {
  int width = 0, layers = 0, heads = 0, kv_heads = 0, head_width = 0;  // D, L, H, G, E
  int feed_forward = 0, vocabulary = 0, context = 0;                   // F, V, positions
  float norm_eps = 1e-5f;
  double rope_base = 10000.0;

  int qkv_width() const { return (heads + 2 * kv_heads) * head_width; }
  /// Bytes of K and V (fp32) that one token occupies in all layers.
  int64_t kv_bytes_per_token() const { return int64_t{2} * layers * kv_heads * head_width * 4; }
};

/// A weight matrix W [outputs x inputs], packed: see kernels.hpp. Copies share the memory.
struct Matrix {
  int outputs = 0, inputs = 0;
  DType type = DType::f32;  // F32, F16, BF16 or Q8_0
  std::shared_ptr<const std::byte> panels;

  template <class Weight>
  const Weight* as() const {
    return reinterpret_cast<const Weight*>(panels.get());
  }

  /// y[inputs] = row o of W, gathered from its panel (an embedding look-up).
  void row(int o, float* y) const {
    const ptrdiff_t at = static_cast<ptrdiff_t>(o / kPanel) * kPanel * inputs + o % kPanel;
    for (int k = 0; k < inputs; ++k) {
      if (type == DType::f32) y[k] = as<float>()[at + k * kPanel];
      if (type == DType::f16) y[k] = half_to_float(as<Half>()[at + k * kPanel].bits);
      if (type == DType::bf16) y[k] = bf16_to_float(as<Bf16>()[at + k * kPanel].bits);
      if (type == DType::q8_0) {
        const std::byte* block =
            panels.get() +
            (static_cast<ptrdiff_t>(o / kPanel) * (inputs / kQ8Inputs) + k / kQ8Inputs) * kQ8Block;
        const std::byte q = block[2 * kPanel + k % kQ8Inputs / 4 * 4 * kPanel + o % kPanel * 4 + k % 4];
        const float scale = half_to_float(reinterpret_cast<const Half*>(block)[o % kPanel].bits);
        y[k] = scale * static_cast<float>(static_cast<int>(q) - 128);
      }
    }
  }
};

/// Bytes of a packed matrix.
inline size_t packed_bytes(DType type, int outputs, int inputs) {
  const DTypeInfo* info = find_dtype(type);
  return packed_size(outputs, inputs) / info->block * info->bytes;
}

struct Layer {
  std::vector<float> attention_norm, ff_norm;  // [D]
  Matrix qkv;                                  // [(H + 2G) E x D]: q heads, k heads, v heads
  Matrix attention_out;                        // [D x H E]
  Matrix gate_up;                              // [2F x D]: gate, then up
  Matrix down;                                 // [D x F]
};

struct Model {
  Config config;
  Matrix embedding;  // [V x D]
  std::vector<Layer> layers;
  std::vector<float> output_norm;  // [D]
  Matrix output_matrix;            // [V x D]; empty when tied to the embedding
  std::vector<float> rope;         // cos and sin: [context x E/2 x 2]

  bool has_q8() const {
    bool found = output().type == DType::q8_0;
    for (const Layer& l : layers)
      for (const Matrix* m : {&l.qkv, &l.attention_out, &l.gate_up, &l.down})
        found = found || m->type == DType::q8_0;
    return found;
  }
  const Matrix& output() const { return !output_matrix.panels ? embedding : output_matrix; }
};

/// Reads and checks the configuration. Errors name the key.
inline Config read_config(const Gguf& file) {
  const std::string architecture = file.get_string("general.architecture");
  if (architecture != "llama")
    fail(file.name, ": general.architecture: expected \"llama\", found \"", architecture, "\"");
  const auto positive = [&](const char* key) {
    const uint64_t value = file.get_u64(std::string("llama.") + key);
    if (value < 1 || value > (1u << 24))
      fail(file.name, ": llama.", key, ": expected a number from 1 to ", 1 << 24, ", found ", value);
    return static_cast<int>(value);
  };
  Config c;
  c.context = positive("context_length");
  c.width = positive("embedding_length");
  c.layers = positive("block_count");
  c.feed_forward = positive("feed_forward_length");
  c.heads = positive("attention.head_count");
  c.kv_heads = file.has("llama.attention.head_count_kv") ? positive("attention.head_count_kv") : c.heads;
  c.norm_eps = file.get_f32("llama.attention.layer_norm_rms_epsilon");
  c.rope_base = file.has("llama.rope.freq_base") ? file.get_f32("llama.rope.freq_base") : 10000.0;
  c.head_width =
      file.has("llama.attention.key_length") ? positive("attention.key_length") : c.width / c.heads;
  c.vocabulary = static_cast<int>(file.get_strings("tokenizer.ggml.tokens").size());

  const auto expect = [&](bool holds, const char* what, auto found) {
    if (!holds) fail(file.name, ": expected ", what, ", found ", found);
  };
  expect(c.heads % c.kv_heads == 0, "attention.head_count to be a multiple of attention.head_count_kv",
         c.kv_heads);
  expect(static_cast<int64_t>(c.heads) * c.head_width <= 1 << 24, "heads of at most 2^24 numbers together",
         static_cast<int64_t>(c.heads) * c.head_width);
  expect(c.head_width % 16 == 0 && c.head_width > 0, "a head width that is a multiple of 16", c.head_width);
  expect(c.width % 16 == 0, "embedding_length to be a multiple of 16", c.width);
  expect(c.feed_forward % 16 == 0, "feed_forward_length to be a multiple of 16", c.feed_forward);
  expect(c.norm_eps > 0 && c.norm_eps < 1, "a layer_norm_rms_epsilon between 0 and 1", c.norm_eps);
  expect(c.rope_base >= 1 && std::isfinite(c.rope_base), "a rope.freq_base of at least 1", c.rope_base);
  if (file.has("llama.rope.dimension_count"))
    expect(positive("rope.dimension_count") == c.head_width, "rope.dimension_count to equal the head width",
           positive("rope.dimension_count"));
  for (const char* key : {"llama.rope.scaling.type", "llama.attention.value_length"})
    if (file.has(key) && !(std::string(key) == "llama.attention.value_length" &&
                           static_cast<int>(file.get_u64(key)) == c.head_width))
      fail(file.name, ": ", key, " is not supported");
  return c;
}

inline Vocabulary read_vocabulary(const Gguf& file) {
  const std::string kind = file.get_string("tokenizer.ggml.model");
  if (kind != "llama") fail(file.name, ": tokenizer.ggml.model: expected \"llama\", found \"", kind, "\"");
  Vocabulary v;
  v.tokens = file.get_strings("tokenizer.ggml.tokens");
  v.scores = file.get_f32s("tokenizer.ggml.scores");
  for (const int32_t t : file.get_i32s("tokenizer.ggml.token_type")) {
    if (t < 1 || t > 6) fail(file.name, ": tokenizer.ggml.token_type: expected 1 to 6, found ", t);
    v.types.push_back(static_cast<TokenType>(t));
  }
  const auto id = [&](const char* key) {
    const uint64_t value = file.get_u64(key);
    if (value >= v.tokens.size())
      fail(file.name, ": ", key, ": expected an id below ", v.tokens.size(), ", found ", value);
    return static_cast<int>(value);
  };
  v.bos = id("tokenizer.ggml.bos_token_id");
  v.eos = id("tokenizer.ggml.eos_token_id");
  v.unk = file.has("tokenizer.ggml.unknown_token_id") ? id("tokenizer.ggml.unknown_token_id") : 0;
  v.add_bos = file.has("tokenizer.ggml.add_bos_token") ? file.get_bool("tokenizer.ggml.add_bos_token") : true;
  v.add_space_prefix =
      file.has("tokenizer.ggml.add_space_prefix") ? file.get_bool("tokenizer.ggml.add_space_prefix") : true;
  return v;
}

/// The tensor of this name, which must be [rows x row_length]; a vector has rows 1.
inline const Tensor& checked_tensor(const Gguf& file, const std::string& name, int rows, int row_length) {
  const Tensor& t = file.tensor(name);
  const auto dim = [&](size_t i) { return i < t.dims.size() ? t.dims[i] : 1; };
  if (dim(0) != static_cast<uint64_t>(row_length) || dim(1) != static_cast<uint64_t>(rows) || dim(2) != 1 ||
      dim(3) != 1)
    fail(file.name, ": tensor ", name, ": expected [", row_length, " x ", rows, "], found [", dim(0), " x ",
         dim(1), " x ", dim(2), " x ", dim(3), "]");
  return t;
}

/// One tensor as floats. Throws Error if one of them is not finite.
inline std::vector<float> read_floats(const Gguf& file, const std::string& name, int rows, int row_length) {
  const Tensor& t = checked_tensor(file, name, rows, row_length);
  std::vector<float> values(static_cast<size_t>(t.elements()));
  dequantize(t, values.data());
  for (const float v : values)
    if (!std::isfinite(v)) fail(file.name, ": tensor ", name, ": expected finite numbers, found ", v);
  return values;
}

/// 32 rows of a file's matrix become panel p; a row that is nullptr becomes zeros. False if one number is not
/// finite. Number: uint32_t for F32, uint16_t for F16 and BF16: their bits, with all bits of the exponent.
template <class Number>
inline bool pack_panel(std::byte* panel, const std::byte* const* rows, int inputs, Number exponent) {
  Number column[kPanel];
  bool finite = true;
  for (int k = 0; k < inputs; ++k) {
    for (int o = 0; o < kPanel; ++o) {
      column[o] = 0;
      if (rows[o]) std::memcpy(&column[o], rows[o] + static_cast<size_t>(k) * sizeof(Number), sizeof(Number));
      finite &= (column[o] & exponent) != exponent;
    }
    std::memcpy(panel + static_cast<size_t>(k) * sizeof column, column, sizeof column);
  }
  return finite;
}

/// The same for Q8_0, whose rows are blocks of a scale (Half) and 32 signed bytes.
inline bool pack_panel_q8(std::byte* panel, const std::byte* const* rows, int inputs) {
  bool finite = true;
  for (int b = 0; b < inputs / kQ8Inputs; ++b, panel += kQ8Block)
    for (int o = 0; o < kPanel; ++o) {
      std::byte from[2 + kQ8Inputs] = {};
      if (rows[o]) std::memcpy(from, rows[o] + static_cast<size_t>(b) * sizeof from, sizeof from);
      finite &= (static_cast<int>(from[1]) & 0x7c) != 0x7c;
      std::memcpy(panel + 2 * o, from, 2);
      for (int k = 0; k < kQ8Inputs; ++k)  // q + 128: flip the sign bit
        panel[2 * kPanel + k / 4 * 4 * kPanel + o * 4 + k % 4] = from[2 + k] ^ std::byte{128};
    }
  return finite;
}

/// The file's bytes of these 32 rows are not needed again: their memory goes back, run by run of neighbours.
inline void forget_rows(const std::byte* const* rows, size_t row_bytes) {
  for (int o = 0, end; o < kPanel && rows[o]; o = end) {
    for (end = o + 1; end < kPanel && rows[end] == rows[end - 1] + row_bytes;) ++end;
    forget_mapped(rows[o], static_cast<size_t>(end - o) * row_bytes);
  }
}

/// Matrices with the same input, one below the other, packed as one straight from the file's bytes: nothing
/// is ever there twice. Its type is that of the parts; parts of different types become floats.
inline Matrix read_matrix(const Gguf& file, int inputs,
                          const std::vector<std::pair<std::string, int>>& parts) {
  Matrix m;
  m.inputs = inputs;
  std::vector<const Tensor*> tensors;
  std::vector<std::vector<float>> widened;  // of parts of different types
  for (const auto& [name, outputs] : parts) {
    tensors.push_back(&checked_tensor(file, name, outputs, inputs));
    m.outputs += outputs;
  }
  m.type = tensors[0]->type;
  bool as_stored =
      m.type == DType::f32 || m.type == DType::f16 || m.type == DType::bf16 || m.type == DType::q8_0;
  for (const Tensor* t : tensors) as_stored = as_stored && t->type == m.type;
  if (!as_stored) {
    m.type = DType::f32;
    for (const auto& [name, outputs] : parts) widened.push_back(read_floats(file, name, outputs, inputs));
  }

  const size_t row_bytes = packed_bytes(m.type, kPanel, inputs) / kPanel;
  std::vector<const std::byte*> rows(static_cast<size_t>(panels_of(m.outputs)) * kPanel);
  size_t at = 0;
  for (size_t i = 0; i < parts.size(); ++i)
    for (int o = 0; o < parts[i].second; ++o, ++at)
      rows[at] = (as_stored ? tensors[i]->data : reinterpret_cast<const std::byte*>(widened[i].data())) +
                 static_cast<size_t>(o) * row_bytes;

  const std::shared_ptr<std::byte> memory = allocate(packed_bytes(m.type, m.outputs, inputs));
  m.panels = memory;
  bool finite = true;
  SERVELITE_OMP(omp parallel for reduction(&& : finite))
  for (int p = 0; p < panels_of(m.outputs); ++p) {
    std::byte* panel = memory.get() + static_cast<size_t>(p) * kPanel * row_bytes;
    const std::byte* const* from = rows.data() + p * kPanel;
    const bool good = m.type == DType::f32    ? pack_panel(panel, from, inputs, uint32_t{0x7f800000})
                      : m.type == DType::f16  ? pack_panel(panel, from, inputs, uint16_t{0x7c00})
                      : m.type == DType::bf16 ? pack_panel(panel, from, inputs, uint16_t{0x7f80})
                                              : pack_panel_q8(panel, from, inputs);
    finite = finite && good;
    if (file.mapped && as_stored) forget_rows(from, row_bytes);
  }
  if (!finite)
    for (const auto& [name, outputs] : parts) read_floats(file, name, outputs, inputs);  // finds and names it
  return m;
}

/// A tensor that the forward pass does not know (biases, experts, rotary factors) would change the answers.
inline void refuse_unknown_tensors(const Gguf& file) {
  static const std::set<std::string> known = {"token_embd",   "output_norm",  "output",     "blk.attn_norm",
                                              "blk.attn_q",   "blk.attn_k",   "blk.attn_v", "blk.attn_output",
                                              "blk.ffn_norm", "blk.ffn_gate", "blk.ffn_up", "blk.ffn_down"};
  for (const Tensor& t : file.tensors) {
    std::string kind = t.name;  // blk.12.attn_q.weight -> blk.attn_q
    if (kind.rfind("blk.", 0) == 0) kind.erase(4, kind.find('.', 4) - 3);
    if (!kind.ends_with(".weight") || !known.count(kind.substr(0, kind.size() - 7)))
      fail(file.name, ": tensor ", t.name, " is not supported");
  }
}

/// The weights of a Llama from an opened file. Throws Error naming the tensor and both shapes.
inline Model read_model(const Gguf& file) {
  Model m;
  m.config = read_config(file);
  refuse_unknown_tensors(file);
  const Config& c = m.config;
  const int D = c.width, E = c.head_width;
  m.embedding = read_matrix(file, D, {{"token_embd.weight", c.vocabulary}});
  for (int l = 0; l < c.layers; ++l) {
    const std::string blk = "blk." + std::to_string(l) + ".";
    Layer w;
    w.attention_norm = read_floats(file, blk + "attn_norm.weight", 1, D);
    w.qkv = read_matrix(file, D,
                        {{blk + "attn_q.weight", c.heads * E},
                         {blk + "attn_k.weight", c.kv_heads * E},
                         {blk + "attn_v.weight", c.kv_heads * E}});
    w.attention_out = read_matrix(file, c.heads * E, {{blk + "attn_output.weight", D}});
    w.ff_norm = read_floats(file, blk + "ffn_norm.weight", 1, D);
    w.gate_up = read_matrix(
        file, D, {{blk + "ffn_gate.weight", c.feed_forward}, {blk + "ffn_up.weight", c.feed_forward}});
    w.down = read_matrix(file, c.feed_forward, {{blk + "ffn_down.weight", D}});
    m.layers.push_back(std::move(w));
  }
  m.output_norm = read_floats(file, "output_norm.weight", 1, D);
  if (file.find_tensor("output.weight"))
    m.output_matrix = read_matrix(file, D, {{"output.weight", c.vocabulary}});
  m.rope = rope_table(c.context, E, c.rope_base);
  return m;
}

/// What one GGUF file holds: the model and its tokenizer.
struct LoadedModel {
  Model model;
  Tokenizer tokenizer;
};

inline LoadedModel load_model(const std::string& path) {
  const Gguf file = read_gguf(path);
  return {read_model(file), Tokenizer(read_vocabulary(file))};
}

}  // namespace servelite
