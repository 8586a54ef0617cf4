// Tests of models/train.hpp and models/recipe.hpp: every gradient against finite differences of a naive
// double-precision forward, and the promise that the same recipe gives the same bytes.
#include <doctest/doctest.h>

#include <cmath>
#include <cstdio>
#include <functional>
#include <numeric>
#include <servelite/serve.hpp>  // fnv1a

#include "../models/recipe.hpp"

using namespace servelite;
using namespace servelite::train;

namespace {

std::vector<float> random_floats(size_t n, uint64_t seed, float scale = 1.0f) {
  Random random{seed};
  std::vector<float> v(n);
  for (float& x : v) x = scale * static_cast<float>(random.normal());
  return v;
}

/// Central difference of f at x[i].
double slope(const std::function<double(const std::vector<double>&)>& f, std::vector<double> x, size_t i) {
  const double h = 1e-5, at = x[i];
  x[i] = at + h;
  const double up = f(x);
  x[i] = at - h;
  return (up - f(x)) / (2 * h);
}

std::vector<double> wide(const std::vector<float>& v) { return {v.begin(), v.end()}; }

/// Every element of a gradient against the slope, relative to the gradient's largest element.
void check_gradient(const std::vector<float>& gradient, const std::vector<float>& at,
                    const std::function<double(const std::vector<double>&)>& f, double tolerance = 2e-5) {
  double largest = 0;
  for (const float g : gradient) largest = std::max(largest, std::abs(static_cast<double>(g)));
  REQUIRE(largest > 1e-6);
  for (size_t i = 0; i < gradient.size(); ++i) {
    CAPTURE(i);
    CHECK(std::abs(static_cast<double>(gradient[i]) - slope(f, wide(at), i)) < tolerance * largest);
  }
}

// ---- a naive model in double ------------------------------------------------------------------------

struct Naive {
  Shape s;
  const Layout& layout;
  const Batch& batch;

  /// The weighted mean cross-entropy, written as plainly as possible.
  double loss(const std::vector<double>& p) const {
    double total = 0, weight = 0;
    for (size_t i = 0; i + 1 < batch.first.size(); ++i) {
      const int begin = batch.first[i], n = batch.first[i + 1] - begin;
      const std::vector<std::vector<double>> y = logits(p, begin, n);
      for (int t = 0; t < n; ++t) {
        const std::vector<double>& row = y[static_cast<size_t>(t)];
        double sum = 0;
        for (const double v : row) sum += std::exp(v);
        const size_t at = static_cast<size_t>(begin + t);
        total += static_cast<double>(batch.weights[at]) *
                 (std::log(sum) - row[static_cast<size_t>(batch.targets[at])]);
        weight += static_cast<double>(batch.weights[at]);
      }
    }
    return total / weight;
  }

  using Row = std::vector<double>;
  Row times(const std::vector<double>& p, size_t w, int n_out, const Row& x) const {
    Row y(static_cast<size_t>(n_out));
    for (size_t o = 0; o < y.size(); ++o)
      for (size_t k = 0; k < x.size(); ++k) y[o] += p[w + o * x.size() + k] * x[k];
    return y;
  }
  Row normed(const std::vector<double>& p, size_t w, const Row& x) const {
    double squares = 0;
    for (const double v : x) squares += v * v;
    Row y(x.size());
    const double scale =
        1 / std::sqrt(squares / static_cast<double>(x.size()) + static_cast<double>(s.norm_eps));
    for (size_t i = 0; i < x.size(); ++i) y[i] = x[i] * scale * p[w + i];
    return y;
  }
  void rotate(double* head, int position) const {
    for (int i = 0; i < s.head_width / 2; ++i) {
      const double angle = position * std::pow(s.rope_base, -2.0 * i / s.head_width);
      const double a = head[2 * i], b = head[2 * i + 1];
      head[2 * i] = a * std::cos(angle) - b * std::sin(angle);
      head[2 * i + 1] = a * std::sin(angle) + b * std::cos(angle);
    }
  }

  std::vector<Row> logits(const std::vector<double>& p, int begin, int n) const {
    const int E = s.head_width, H = s.heads, G = s.kv_heads;
    std::vector<Row> x;
    for (int t = 0; t < n; ++t) {
      const auto row = p.begin() + static_cast<ptrdiff_t>(layout.embedding) +
                       batch.tokens[static_cast<size_t>(begin + t)] * s.width;
      x.emplace_back(row, row + s.width);
    }
    for (const Layout::Block& w : layout.blocks) {
      std::vector<Row> qkv;
      for (int t = 0; t < n; ++t) {
        qkv.push_back(times(p, w.qkv, s.qkv_width(), normed(p, w.attention_norm, x[static_cast<size_t>(t)])));
        for (int h = 0; h < H + G; ++h) rotate(qkv.back().data() + h * E, t);
      }
      for (int t = 0; t < n; ++t) {
        Row heads(static_cast<size_t>(H * E));
        for (int h = 0; h < H; ++h) {
          const double* q = qkv[static_cast<size_t>(t)].data() + h * E;
          const int g = h / (H / G);
          Row score(static_cast<size_t>(t) + 1);
          double sum = 0;
          for (size_t u = 0; u < score.size(); ++u) {
            for (int e = 0; e < E; ++e) score[u] += q[e] * qkv[u][static_cast<size_t>((H + g) * E + e)];
            sum += score[u] = std::exp(score[u] / std::sqrt(static_cast<double>(E)));
          }
          for (size_t u = 0; u < score.size(); ++u)
            for (int e = 0; e < E; ++e)
              heads[static_cast<size_t>(h * E + e)] +=
                  score[u] / sum * qkv[u][static_cast<size_t>((H + G + g) * E + e)];
        }
        const Row out = times(p, w.attention_out, s.width, heads);
        for (size_t i = 0; i < out.size(); ++i) x[static_cast<size_t>(t)][i] += out[i];
        const Row both =
            times(p, w.gate_up, 2 * s.feed_forward, normed(p, w.ff_norm, x[static_cast<size_t>(t)]));
        Row active(static_cast<size_t>(s.feed_forward));
        for (size_t i = 0; i < active.size(); ++i)
          active[i] = both[i] / (1 + std::exp(-both[i])) * both[i + active.size()];
        const Row down = times(p, w.down, s.width, active);
        for (size_t i = 0; i < down.size(); ++i) x[static_cast<size_t>(t)][i] += down[i];
      }
    }
    std::vector<Row> y;
    for (const Row& row : x)
      y.push_back(times(p, layout.embedding, s.vocabulary, normed(p, layout.output_norm, row)));
    return y;
  }
};

Shape small_shape() {
  Shape s;
  s.vocabulary = 48, s.width = 32, s.layers = 2, s.heads = 4, s.kv_heads = 2, s.head_width = 16,
  s.feed_forward = 48;
  s.context = 256;
  return s;
}

Batch random_batch(int vocabulary, const std::vector<int>& lengths) {
  Batch b;
  Random random{5};
  b.first.push_back(0);
  for (const int n : lengths) {
    for (int i = 0; i < n; ++i) {
      b.tokens.push_back(static_cast<int>(random.next() % static_cast<uint64_t>(vocabulary)));
      b.targets.push_back(static_cast<int>(random.next() % static_cast<uint64_t>(vocabulary)));
      b.weights.push_back(i + 1 == n ? 0.0f : i % 3 == 0 ? 1.0f : 0.1f);
    }
    b.first.push_back(b.size());
  }
  return b;
}

}  // namespace

TEST_CASE("train: rmsnorm backward, input and weight") {
  const int d = 32, rows = 3;
  const std::vector<float> x = random_floats(rows * d, 1), w = random_floats(d, 2),
                           dy = random_floats(rows * d, 3);
  const auto loss = [&](const std::vector<double>& in, const std::vector<double>& weight) {
    double sum = 0;
    for (size_t t = 0; t < rows; ++t) {
      double squares = 0;
      for (size_t i = 0; i < d; ++i) squares += in[t * d + i] * in[t * d + i];
      for (size_t i = 0; i < d; ++i)
        sum += in[t * d + i] / std::sqrt(squares / d + 1e-5) * weight[i] * static_cast<double>(dy[t * d + i]);
    }
    return sum;
  };
  std::vector<float> y(d), scale(rows), dx(rows * d), dw(d);
  for (int t = 0; t < rows; ++t) {
    scale[static_cast<size_t>(t)] = rmsnorm(y.data(), x.data() + t * d, w.data(), d, 1e-5f);
    rmsnorm_back(dx.data() + t * d, dy.data() + t * d, x.data() + t * d, w.data(),
                 scale[static_cast<size_t>(t)], d);
  }
  rmsnorm_weight_back(dw.data(), dy.data(), x.data(), scale.data(), rows, d, 0, d);
  check_gradient(dx, x, [&](const std::vector<double>& in) { return loss(in, wide(w)); });
  check_gradient(dw, w, [&](const std::vector<double>& weight) { return loss(wide(x), weight); });
  std::vector<float> twice = dx;  // dx is added to, not overwritten
  rmsnorm_back(twice.data(), dy.data(), x.data(), w.data(), scale[0], d);
  CHECK(twice[0] == doctest::Approx(2 * dx[0]));
}

TEST_CASE("train: swiglu backward") {
  const std::vector<float> gate = random_floats(32, 1, 2.0f), up = random_floats(32, 2),
                           da = random_floats(32, 3);
  std::vector<float> dgate = gate, dup = up;
  swiglu_back(dgate.data(), dup.data(), da.data(), 32);
  const auto loss = [&](const std::vector<double>& g, const std::vector<double>& u) {
    double sum = 0;
    for (size_t i = 0; i < 32; ++i) sum += g[i] / (1 + std::exp(-g[i])) * u[i] * static_cast<double>(da[i]);
    return sum;
  };
  check_gradient(dgate, gate, [&](const std::vector<double>& g) { return loss(g, wide(up)); });
  check_gradient(dup, up, [&](const std::vector<double>& u) { return loss(wide(gate), u); });
}

TEST_CASE("train: softmax backward") {
  const size_t n = 21, m = 32;
  const std::vector<float> scores = random_floats(n, 1), dp = random_floats(n, 2);
  std::vector<float> p(scores), ds(dp);
  p.resize(m), ds.resize(m, 7.0f);
  const float total = softmax_numerators(p.data(), n);
  for (float& v : p) v /= total;
  AttentionUnit::softmax_back(ds.data(), p.data(), n, m);
  for (size_t i = n; i < m; ++i) CHECK(ds[i] == 0.0f);
  ds.resize(n);
  check_gradient(ds, scores, [&](const std::vector<double>& s) {
    double sum = 0, loss = 0;
    for (const double v : s) sum += std::exp(v);
    for (size_t i = 0; i < n; ++i) loss += std::exp(s[i]) / sum * static_cast<double>(dp[i]);
    return loss;
  });
}

TEST_CASE("train: matrix product backward, input and weight, also over several chunks of tokens") {
  for (const int rows : {1, 5, kChunk, kChunk + 3}) {
    const int K = 33, N = 50;  // no multiples of a panel
    const size_t T = static_cast<size_t>(rows);
    const std::vector<float> x = random_floats(T * K, 1), w = random_floats(N * K, 2),
                             dy = random_floats(T * N, 3);
    std::vector<float> y(T * N), dx(T * K), dw(N * K), packed;
    std::vector<std::vector<float>> scratch(2);
    product(y.data(), x.data(), w.data(), rows, K, N, packed, 2);
    product_back(dx.data(), dy.data(), w.data(), rows, K, N, packed, 2);
    product_weights(dw.data(), dy.data(), x.data(), rows, K, N, scratch, 2);
    const auto close = [](float found, double expected) {
      return std::abs(static_cast<double>(found) - expected) < 1e-3;
    };
    for (size_t t = 0; t < T; t += 7)
      for (size_t o = 0; o < N; ++o) {
        double sum = 0;
        for (size_t k = 0; k < K; ++k)
          sum += static_cast<double>(x[t * K + k]) * static_cast<double>(w[o * K + k]);
        CHECK(close(y[t * N + o], sum));
      }
    for (size_t t = 0; t < T; t += 7)
      for (size_t k = 0; k < K; ++k) {
        double sum = 0;
        for (size_t o = 0; o < N; ++o)
          sum += static_cast<double>(dy[t * N + o]) * static_cast<double>(w[o * K + k]);
        CHECK(close(dx[t * K + k], sum));
      }
    for (size_t o = 0; o < N; o += 3)
      for (size_t k = 0; k < K; ++k) {
        double sum = 0;
        for (size_t t = 0; t < T; ++t)
          sum += static_cast<double>(dy[t * N + o]) * static_cast<double>(x[t * K + k]);
        CHECK(close(dw[o * K + k], sum));
      }
  }
}

TEST_CASE("train: attention backward, lengths around the row tile, q k and v") {
  const Shape s = small_shape();
  for (const int n : {1, 2, 63, 64, 65, 100}) {
    CAPTURE(n);
    const int W = s.qkv_width(), E = s.head_width, HE = s.heads * E, group = s.heads / s.kv_heads, g = 1;
    const std::vector<float> qkv = random_floats(static_cast<size_t>(n * W), 1, 0.7f),
                             dout = random_floats(static_cast<size_t>(n * HE), 2);
    std::vector<float> out(static_cast<size_t>(n * HE)), dqkv(static_cast<size_t>(n * W)), buffer;
    const AttentionUnit unit{s, n, g, buffer};
    unit.forward(out.data(), HE, qkv.data());
    unit.backward(dqkv.data(), dout.data(), HE, qkv.data());
    const auto loss = [&](const std::vector<double>& in) {
      double sum_all = 0;
      for (int h = g * group; h < (g + 1) * group; ++h)
        for (int t = 0; t < n; ++t) {
          std::vector<double> p(static_cast<size_t>(t) + 1);
          double sum = 0;
          for (int u = 0; u <= t; ++u) {
            double dot = 0;
            for (int e = 0; e < E; ++e)
              dot += in[static_cast<size_t>(t * W + h * E + e)] *
                     in[static_cast<size_t>(u * W + (s.heads + g) * E + e)];
            sum += p[static_cast<size_t>(u)] = std::exp(dot);
          }
          for (int u = 0; u <= t; ++u)
            for (int e = 0; e < E; ++e)
              sum_all += p[static_cast<size_t>(u)] / sum *
                         in[static_cast<size_t>(u * W + (s.heads + s.kv_heads + g) * E + e)] *
                         static_cast<double>(dout[static_cast<size_t>(t * HE + h * E + e)]);
        }
      return sum_all;
    };
    double largest = 0;
    for (const float v : dqkv) largest = std::max(largest, std::abs(static_cast<double>(v)));
    Random random{9};
    for (int sample = 0; sample < 40; ++sample) {  // elements of this unit: its q heads, its k, its v
      const int t = static_cast<int>(random.next() % static_cast<uint64_t>(n)),
                e = static_cast<int>(random.next() % static_cast<uint64_t>(E));
      const int heads[] = {g * group, g * group + 1, s.heads + g, s.heads + s.kv_heads + g};
      const size_t i = static_cast<size_t>(t * W + heads[sample % 4] * E + e);
      CAPTURE(i);
      CHECK(std::abs(static_cast<double>(dqkv[i]) - slope(loss, wide(qkv), i)) < 2e-5 * largest);
    }
  }
}

TEST_CASE("train: the whole model's loss and gradient against the naive model, tensor by tensor") {
  const Shape s = small_shape();
  Trainer trainer(s, 3, 2);
  Random random{11};
  for (float& p : trainer.parameters) p += 0.1f * static_cast<float>(random.normal());  // norms other than 1
  const Batch batch = random_batch(s.vocabulary, {13, 1, 9});
  const Naive naive{s, trainer.layout, batch};
  const std::vector<double> p = wide(trainer.parameters);
  CHECK(trainer.run(batch).all == doctest::Approx(naive.loss(p)).epsilon(1e-5));
  const auto loss = [&](const std::vector<double>& q) { return naive.loss(q); };
  for (const Layout::Tensor& tensor : trainer.layout.tensors) {
    CAPTURE(tensor.name);
    double largest = 0;
    for (size_t i = 0; i < tensor.size(); ++i)
      largest = std::max(largest, std::abs(static_cast<double>(trainer.gradients[tensor.at + i])));
    REQUIRE(largest > 0);
    for (int sample = 0; sample < 12; ++sample) {
      const size_t i = tensor.at + random.next() % tensor.size();
      CHECK(std::abs(static_cast<double>(trainer.gradients[i]) - slope(loss, p, i)) < 1e-4 * largest);
    }
  }
}

TEST_CASE("train: AdamW by hand, two steps") {
  Shape s = small_shape();
  Layout layout(s);
  std::vector<float> p(layout.size, 1.0f), g(layout.size, 0.0f);
  g[layout.embedding] = 0.5f;  // a matrix: decays. Norm 0.5 < 1: not clipped
  Adam adam;
  adam.step(layout, p, g, 0.1f, 1);
  // m = 0.05, v = 0.0125; corrected 0.5 and 0.25: the step is 0.1 * 0.5 / 0.5 after a decay of 1 - 0.1 * 0.1
  CHECK(p[layout.embedding] == doctest::Approx(0.99 - 0.1));
  CHECK(p[layout.embedding + 1] == doctest::Approx(0.99));
  CHECK(p[layout.output_norm] == 1.0f);  // norms do not decay
  g[layout.embedding] = 4.0f;            // clipped to 1
  adam.step(layout, p, g, 0.1f, 1);
  const double m = 0.9 * 0.05 + 0.1 * 1, v = 0.95 * 0.0125 + 0.05 * 1;
  CHECK(p[layout.embedding] == doctest::Approx(0.89 * 0.99 - 0.1 * (m / 0.19) / std::sqrt(v / 0.0975)));
}

namespace {

Recipe short_recipe() {
  Recipe r;
  r.shape = small_shape();
  r.shape.vocabulary = 384, r.shape.context = 1024;
  r.steps = 6, r.batch = 300, r.warmup = 2, r.vocabulary_texts = 20;
  return r;
}

uint64_t hash_of(const Run& run) {
  return fnv1a(run.trainer.parameters.data(), run.trainer.parameters.size() * sizeof(float));
}

}  // namespace

TEST_CASE("train: the same recipe gives the same bits on 1, 2 and 3 threads, and resumed from a checkpoint") {
  const Recipe recipe = short_recipe();
  std::vector<uint64_t> hashes;
  std::vector<double> losses;
  for (const int threads : {1, 2, 3}) {
    Run run(recipe, threads);
    losses.clear();
    while (run.step < recipe.steps) losses.push_back(run.advance().all);
    hashes.push_back(hash_of(run));
  }
  CHECK(losses.back() < losses.front());
  CHECK(hashes[1] == hashes[0]);
  CHECK(hashes[2] == hashes[0]);

  const std::string file = "test_train.ckpt";
  {
    Run first(recipe, 2);
    while (first.step < 3) first.advance();
    first.save(file);
  }
  Run second(recipe, 1);
  second.load(file);
  CHECK(second.step == 3);
  while (second.step < recipe.steps) second.advance();
  CHECK(hash_of(second) == hashes[0]);

  Recipe other = recipe;
  other.rate *= 2;
  CHECK_THROWS_WITH_AS(Run(other, 1).load(file), doctest::Contains("another"), Error);
  std::remove(file.c_str());
  CHECK_THROWS_AS(Run(recipe, 1).load(file), Error);

  // The same on every machine, compiler and vector width. Changes when the recipe or the corpus does.
  CHECK(hashes[0] == 183388071493029990ull);
}

TEST_CASE("train: weights of the loss follow the recipe") {
  const Recipe recipe = short_recipe();
  const Run run(recipe, 1);
  const Tokenizer tokenizer(run.vocabulary);
  corpus::Conversation c;
  c.system = "Hi.";
  c.turns.push_back({"", true, "x", std::string(40, '7'), ""});  // 41 tokens: the blank and 40 digits
  Batch b;
  b.first.push_back(0);
  append_conversation(b, c, tokenizer, recipe);
  // <s> <|system|> _H i . <|end|> <|user|> _ x <|end|> <|assistant|> 41 tokens <|end|>, or fewer pieces
  // before
  const int n = b.size();
  REQUIRE(n > 45);
  CHECK(b.weights[static_cast<size_t>(n - 1)] == 0.0f);  // nothing follows
  CHECK(b.weights[static_cast<size_t>(n - 2)] == 1.0f);  // the end of the answer
  for (int i = n - 43; i < n - 2; ++i) CHECK(b.weights[static_cast<size_t>(i)] == doctest::Approx(16.0 / 41));
  for (int i = 0; i < n - 43; ++i) CHECK(b.weights[static_cast<size_t>(i)] == recipe.rest_weight);
  for (int i = 0; i + 1 < n; ++i)
    CHECK(b.targets[static_cast<size_t>(i)] == b.tokens[static_cast<size_t>(i) + 1]);
  CHECK(b.tokens[static_cast<size_t>(n - 1)] == tokenizer.eos());
}
