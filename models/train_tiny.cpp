// train_tiny: makes the shipped model. The recipe is in recipe.hpp, the arithmetic in train.hpp, the text
// in corpus.hpp. The same recipe gives the same file, byte for byte, on any number of threads.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <servelite/transformer.hpp>  // default_threads

#include "../examples/cli.hpp"
#include "recipe.hpp"

using namespace servelite;

namespace {

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// One line on stderr: rewritten in place on a terminal, else a new line every 15 seconds.
class Progress {
 public:
  void show(const train::Run& run, const train::Trainer::Loss& loss, bool last) {
    smooth_ = smooth_ < 0 ? loss.answers : 0.98 * smooth_ + 0.02 * loss.answers;
    const double now = seconds();
    const bool terminal = isatty(2) != 0;
    if (!last && now - shown_ < (terminal ? 0.5 : 15.0)) return;
    shown_ = now;
    if (first_step_ < 0) first_step_ = run.step, first_tokens_ = run.tokens, begin_ = now;
    const double done = run.step - first_step_, left = run.recipe.steps - run.step;
    const double per_step = done > 0 ? (now - begin_) / done : 0;
    std::fprintf(
        stderr,
        "%sstep %d of %d, %.2f M tokens, loss on answers %.4f, rate %.5f, %.0f tokens/s, %.0f s left%s",
        terminal ? "\r" : "", run.step, run.recipe.steps, static_cast<double>(run.tokens) * 1e-6, smooth_,
        static_cast<double>(run.rate()),
        now > begin_ ? static_cast<double>(run.tokens - first_tokens_) / (now - begin_) : 0.0,
        left * per_step, terminal && !last ? "  " : "\n");
  }

 private:
  double smooth_ = -1, shown_ = 0, begin_ = 0;
  int first_step_ = -1;
  int64_t first_tokens_ = 0;
};

int make(Options& o) {
  train::Recipe recipe;
  recipe.seed = static_cast<uint64_t>(o.integer("seed", 0, 1 << 30));
  if (o.given("steps")) recipe.steps = o.integer("steps", 1, 10000000);
  const int threads = o.threads();
  train::Run run(recipe, threads > 0 ? threads : default_threads());
  const std::string checkpoint = o.text("checkpoint");
  if (!checkpoint.empty() && std::filesystem::exists(checkpoint)) run.load(checkpoint);

  const double begin = seconds();
  double saved = begin;
  Progress progress;
  std::fprintf(stderr, "%zu parameters, %d threads, from step %d\n", run.trainer.layout.size,
               run.trainer.threads, run.step);
  while (run.step < recipe.steps) {
    const train::Trainer::Loss loss = run.advance();
    progress.show(run, loss, run.step == recipe.steps);
    if (!checkpoint.empty() && (seconds() - saved > 30 || run.step == recipe.steps))
      run.save(checkpoint), saved = seconds();
  }
  run.write_model(o.text("out"));
  std::printf("%s: %.1f M tokens in %.0f s\n", o.text("out").c_str(), static_cast<double>(run.tokens) * 1e-6,
              seconds() - begin);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return run_main("train_tiny", [&] {
    Options o("train_tiny", "trains the shipped model from nothing: corpus, vocabulary, weights");
    o.add("out", "F", "servelite-tiny.gguf", "the model file to write");
    o.add("seed", "N", "1", "everything random comes from it");
    o.add("steps", "N", "", "optimiser steps (default: the recipe's)");
    o.add("threads", "N", "0", "threads; 0: all cores. The file is the same with any number");
    o.add("checkpoint", "F", "", "resume from this file if it exists; write it every 30 s");
    return o.parse(argc, argv) ? make(o) : 0;
  });
}
