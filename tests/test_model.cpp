// Loading a model: what a good file becomes, and what is said of a bad one.
#include <doctest/doctest.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <limits>
#include <servelite/model.hpp>
#include <string>

#include "reference.hpp"

using namespace servelite;
using namespace servelite::test;

namespace {

/// What read_model() or read_vocabulary() says of these parts; "" if nothing.
std::string complaint(const Parts& parts) {
  const Gguf file = file_of(parts);
  try {
    read_model(file);
    read_vocabulary(file);
    return "";
  } catch (const Error& e) {
    return e.what();
  }
}

/// The complaint names the file and holds all of these.
template <class... Needles>
void check_says(const Parts& parts, Needles... needles) {
  const std::string said = complaint(parts);
  CAPTURE(said);
  CHECK(said.rfind("test.gguf: ", 0) == 0);
  for (const std::string& needle : {std::string(needles)...}) {
    CAPTURE(needle);
    CHECK(said.find(needle) != std::string::npos);
  }
}

void remove_key(Parts& parts, const std::string& key) {
  std::erase_if(parts.metadata, [&](const auto& entry) { return entry.first == key; });
}

}  // namespace

TEST_CASE("model: configuration and weights are those of the file") {
  const Shape shape{48, 3, 6, 2, 32, 80, 270, 100, false, 5000.0f, 3};
  Parts parts = random_model(shape);
  const Model m = read_model(file_of(parts));
  const Config& c = m.config;
  CHECK(c.width == 48);
  CHECK(c.layers == 3);
  CHECK(c.heads == 6);
  CHECK(c.kv_heads == 2);
  CHECK(c.head_width == 32);
  CHECK(c.feed_forward == 80);
  CHECK(c.vocabulary == 270);
  CHECK(c.context == 100);
  CHECK(c.norm_eps == 1e-5f);
  CHECK(c.rope_base == 5000.0);
  CHECK(c.qkv_width() == (6 + 2 + 2) * 32);
  CHECK(c.kv_bytes_per_token() == 2 * 3 * 2 * 32 * 4);
  CHECK(m.rope.size() == 100 * 32);

  // Every row of every matrix comes back from its panels; q, k, v and gate, up lie one below the other.
  const auto same = [&](const Matrix& matrix, const std::string& name, int first) {
    const Parts::Plain& t = parts.tensor(name + ".weight");
    const size_t inputs = t.dims[0], outputs = t.dims.size() > 1 ? t.dims[1] : 1;
    REQUIRE(matrix.inputs == static_cast<int>(inputs));
    std::vector<float> row(inputs);
    for (size_t o = 0; o < outputs; ++o) {
      matrix.row(first + static_cast<int>(o), row.data());
      if (!std::equal(row.begin(), row.end(), t.values.begin() + static_cast<ptrdiff_t>(o * inputs)))
        return false;
    }
    return true;
  };
  CHECK(same(m.embedding, "token_embd", 0));
  CHECK(same(m.output(), "output", 0));
  CHECK(m.output_norm == parts.tensor("output_norm.weight").values);
  REQUIRE(m.layers.size() == 3);
  for (int l = 0; l < 3; ++l) {
    const Layer& w = m.layers[static_cast<size_t>(l)];
    const std::string blk = "blk." + std::to_string(l) + ".";
    CHECK(same(w.qkv, blk + "attn_q", 0));
    CHECK(same(w.qkv, blk + "attn_k", 6 * 32));
    CHECK(same(w.qkv, blk + "attn_v", 8 * 32));
    CHECK(w.qkv.outputs == 10 * 32);
    CHECK(same(w.attention_out, blk + "attn_output", 0));
    CHECK(same(w.gate_up, blk + "ffn_gate", 0));
    CHECK(same(w.gate_up, blk + "ffn_up", 80));
    CHECK(same(w.down, blk + "ffn_down", 0));
    CHECK(w.attention_norm == parts.tensor(blk + "attn_norm.weight").values);
    CHECK(w.ff_norm == parts.tensor(blk + "ffn_norm.weight").values);
  }
}

TEST_CASE("model: what may be left out") {
  Parts parts = random_model({.kv_heads = 2, .tied = true});
  for (const char* key : {"attention.head_count_kv", "attention.key_length", "attention.value_length",
                          "rope.dimension_count", "rope.freq_base"})
    remove_key(parts, std::string("llama.") + key);
  for (const char* key : {"unknown_token_id", "add_bos_token", "add_space_prefix"})
    remove_key(parts, std::string("tokenizer.ggml.") + key);
  CHECK(complaint(parts).empty());
  const Gguf file = file_of(parts);
  const Model m = read_model(file);
  CHECK(m.config.kv_heads == 2);  // as many as heads
  CHECK(m.config.head_width == 16);
  CHECK(m.config.rope_base == 10000.0);
  CHECK(!m.output_matrix.panels);
  CHECK(&m.output() == &m.embedding);
  const Vocabulary v = read_vocabulary(file);
  CHECK(v.unk == 0);
  CHECK(v.add_bos);
  CHECK(v.add_space_prefix);
}

TEST_CASE("model: from a file on disk, with its tokenizer") {
  const auto ticks = std::chrono::steady_clock::now().time_since_epoch().count();  // a name of its own
  const std::string path =
      (std::filesystem::temp_directory_path() / ("servelite_test_model_" + std::to_string(ticks) + ".gguf"))
          .string();
  Parts parts = random_model({});
  std::vector<Tensor> tensors;
  for (const Parts::Plain& t : parts.tensors)
    tensors.push_back(make_tensor(t.name, DType::f32, t.dims, t.values.data()));
  write_gguf(path, parts.metadata, tensors);
  const LoadedModel loaded = load_model(path);
  std::filesystem::remove(path);
  CHECK(loaded.model.config.vocabulary == 263);
  CHECK(loaded.tokenizer.size() == 263);
  CHECK(loaded.tokenizer.eos() == 6);
  CHECK(loaded.model.output_norm == parts.tensor("output_norm.weight").values);  // outlives the file
  CHECK_THROWS_WITH_AS(load_model(path), doctest::Contains(path.c_str()), Error);
}

TEST_CASE("model: every missing key and tensor is named") {
  const Parts good = random_model({});
  for (const char* key :
       {"general.architecture", "llama.context_length", "llama.embedding_length", "llama.block_count",
        "llama.feed_forward_length", "llama.attention.head_count", "llama.attention.layer_norm_rms_epsilon",
        "tokenizer.ggml.model", "tokenizer.ggml.tokens", "tokenizer.ggml.scores", "tokenizer.ggml.token_type",
        "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id"}) {
    Parts parts = good;
    remove_key(parts, key);
    check_says(parts, key);
  }
  for (const Parts::Plain& t : good.tensors) {
    if (t.name == "output.weight") continue;  // tied then
    Parts parts = good;
    std::erase_if(parts.tensors, [&](const auto& other) { return other.name == t.name; });
    check_says(parts, t.name);
  }
}

TEST_CASE("model: every wrong shape is named, with both shapes") {
  const Parts good = random_model({});
  for (const Parts::Plain& t : good.tensors) {
    Parts parts = good;
    Parts::Plain& longer = parts.tensor(t.name);
    longer.dims.back() += 1;
    longer.values.resize(longer.values.size() + longer.dims[0]);
    check_says(parts, t.name, "expected [" + std::to_string(t.dims[0]),
               "found [" + std::to_string(longer.dims[0]));
    Parts deeper = good;
    deeper.tensor(t.name).dims.resize(3, 1);
    deeper.tensor(t.name).dims[2] = 2;
    deeper.tensor(t.name).values.resize(2 * t.values.size());
    check_says(deeper, t.name, " x 2 x 1]");
  }
  Parts turned = good;
  std::swap(turned.tensor("blk.1.ffn_down.weight").dims[0], turned.tensor("blk.1.ffn_down.weight").dims[1]);
  check_says(turned, "blk.1.ffn_down.weight", "[48 x 32]", "[32 x 48 x 1 x 1]");
}

TEST_CASE("model: weights that are no numbers are refused") {
  for (const float bad :
       {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(), std::nanf("")}) {
    Parts parts = random_model({});
    parts.tensor("blk.1.attn_v.weight").values.back() = bad;
    check_says(parts, "blk.1.attn_v.weight", "finite");
  }
}

TEST_CASE("model: configurations that this code does not compute are refused, not computed wrongly") {
  const auto with = [](const std::string& key, Value value) {
    Parts parts = random_model({});
    remove_key(parts, key);
    parts.metadata.emplace_back(key, std::move(value));
    return parts;
  };
  check_says(with("general.architecture", std::string("gpt2")), "general.architecture", "\"llama\"",
             "\"gpt2\"");
  check_says(with("llama.rope.scaling.type", std::string("linear")), "llama.rope.scaling.type",
             "not supported");
  check_says(with("llama.attention.value_length", uint32_t{32}), "llama.attention.value_length",
             "not supported");
  check_says(with("llama.rope.dimension_count", uint32_t{8}), "rope.dimension_count", "found 8");
  check_says(with("llama.attention.head_count_kv", uint32_t{3}), "multiple of attention.head_count_kv",
             "found 3");
  check_says(with("llama.attention.key_length", uint32_t{8}), "multiple of 16", "found 8");
  check_says(with("llama.embedding_length", uint32_t{40}), "embedding_length", "found 40");
  check_says(with("llama.feed_forward_length", uint32_t{50}), "feed_forward_length", "found 50");
  check_says(with("llama.block_count", uint32_t{0}), "llama.block_count", "found 0");
  check_says(with("llama.block_count", uint32_t{3}), "blk.2.attn_norm.weight");
  check_says(with("llama.context_length", uint64_t{1} << 40), "llama.context_length", "found 1099511627776");
  check_says(with("llama.context_length", std::string("many")), "llama.context_length");
  check_says(with("llama.rope.freq_base", 0.0f), "rope.freq_base", "found 0");
  check_says(with("llama.rope.freq_base", std::numeric_limits<float>::infinity()), "rope.freq_base");
  check_says(with("llama.attention.layer_norm_rms_epsilon", std::nanf("")), "layer_norm_rms_epsilon");
  Parts huge = with("llama.attention.key_length", uint32_t{1} << 24);  // H E does not fit an int
  huge.key("llama.attention.head_count") = uint32_t{1} << 20;
  huge.key("llama.rope.dimension_count") = uint32_t{1} << 24;
  check_says(huge, "2^24");

  for (const char* name : {"rope_freqs.weight", "blk.0.attn_q.bias", "blk.1.ffn_gate_inp.weight", "blk.0"}) {
    Parts extra = random_model({});
    extra.tensors.push_back({name, {16}, std::vector<float>(16, 1.0f)});
    check_says(extra, name, "not supported");
  }
}

TEST_CASE("model: vocabularies that make no sense are refused") {
  const auto with = [](const std::string& key, Value value) {
    Parts parts = random_model({});
    parts.key("tokenizer.ggml." + key) = std::move(value);
    return parts;
  };
  check_says(with("model", std::string("gpt2")), "tokenizer.ggml.model", "\"gpt2\"");
  check_says(with("bos_token_id", uint32_t{263}), "bos_token_id", "below 263, found 263");
  check_says(with("eos_token_id", uint32_t{4000000000}), "eos_token_id", "4000000000");
  check_says(with("eos_token_id", int32_t{-1}), "eos_token_id");
  check_says(with("token_type", std::vector<int32_t>(263, 7)), "token_type", "1 to 6, found 7");
  check_says(with("tokens", std::vector<std::string>{"a", "b"}), "token_embd.weight", "[32 x 2]",
             "[32 x 263");
}
