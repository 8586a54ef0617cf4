// The presets: parameters counted by hand and against TinyLlama's published figure; weights that are what is
// said.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <servelite/preset.hpp>

using namespace servelite;

TEST_CASE("preset: as many parameters as the models they are named after") {
  const Config a = preset_config("110m");  // a layer: 768 * 2304 + 768 * 768 + 3 * 768 * 2048 = 7,077,888
  CHECK(matrix_weights(a, false) == 12 * int64_t{7077888});
  CHECK(matrix_weights(a) == 12 * int64_t{7077888} + 768 * 32000);
  const Config b = preset_config("1b");  // TinyLlama-1.1B's safetensors hold 1,100,048,384 parameters
  const int64_t norms = int64_t{b.width} * (2 * b.layers + 1), embedding = int64_t{b.width} * b.vocabulary;
  CHECK(matrix_weights(b) + embedding + norms == 1100048384);
  CHECK_THROWS_WITH_AS(preset_config("7b"), "preset: expected tiny, 110m or 1b, found '7b'", Error);
}

TEST_CASE("preset: weights of mean 0 and variance 1 / inputs, the same each time, in every type") {
  const Gguf first = make_preset("tiny", DType::f32), again = make_preset("tiny", DType::f32);
  REQUIRE(first.tensors.size() == again.tensors.size());
  int matrices = 0;
  for (size_t i = 0; i < first.tensors.size(); ++i) {
    const Tensor& t = first.tensors[i];
    CAPTURE(t.name);
    REQUIRE(t.bytes == again.tensors[i].bytes);
    CHECK(std::memcmp(t.data, again.tensors[i].data, static_cast<size_t>(t.bytes)) == 0);
    if (t.dims.size() != 2) continue;
    ++matrices;
    const size_t n = static_cast<size_t>(t.bytes) / sizeof(float);
    std::vector<float> w(n);
    std::memcpy(w.data(), t.data, n * sizeof(float));
    double sum = 0, squares = 0;
    for (const float x : w) sum += double{x}, squares += double{x} * double{x};
    const double count = static_cast<double>(n), inputs = static_cast<double>(t.dims[0]);
    CHECK(std::abs(sum / count) < 5 / std::sqrt(inputs * count));  // five standard errors
    // A uniform number's square has variance 4/5 of its mean squared.
    CHECK(std::abs(squares / count * inputs - 1) < 5 * std::sqrt(0.8 / count));
  }
  CHECK(matrices == 1 + 7 * 4);  // the embedding, which is the output too, and seven a layer
  for (const DType type : {DType::f16, DType::bf16, DType::q8_0}) {
    const Model m = read_model(make_preset("tiny", type));
    CHECK(m.layers.size() == 4);
    CHECK(m.layers[0].qkv.type == type);
  }
}
