// The shipped model on the six-request scene: the answers a reader can check, the same from every batcher.
#include <doctest/doctest.h>

#include <filesystem>
#include <memory>
#include <servelite/servelite.hpp>

using namespace servelite;

namespace {

RunReport serve_six(const LoadedModel& loaded, bool continuous) {
  const Config& c = loaded.model.config;
  BlockPool pool(256, 16);
  Transformer executor(loaded.model, pool.size(), pool.block_size());
  const ModelLimits limits{c.context, c.vocabulary, loaded.tokenizer.eos()};
  std::unique_ptr<Batcher> batcher;
  if (continuous)
    batcher = std::make_unique<ContinuousBatcher>(pool, limits, ContinuousOptions{});
  else
    batcher = std::make_unique<StaticBatcher>(pool, limits, StaticOptions{1, 0.0, false});
  ServeOptions options;
  options.tokenizer = &loaded.tokenizer;
  return serve(continuous ? "continuous" : "serial", *batcher, executor, six_requests(), options);
}

}  // namespace

TEST_CASE("shipped model: size, shape and vocabulary are as the model card says") {
  CHECK(std::filesystem::file_size(SERVELITE_MODEL) <= 6000000);
  const LoadedModel loaded = load_model(SERVELITE_MODEL);
  CHECK(loaded.model.config.context == 1024);
  CHECK(loaded.model.config.vocabulary == 768);
  CHECK(loaded.model.config.kv_bytes_per_token() == 2048);
  CHECK(loaded.tokenizer.vocabulary().tokens[static_cast<size_t>(loaded.tokenizer.eos())] == "<|end|>");
}

TEST_CASE("shipped model: the six answers, one by one and continuously, bit for bit the same") {
  const LoadedModel loaded = load_model(SERVELITE_MODEL);
  const RunReport serial = serve_six(loaded, false), continuous = serve_six(loaded, true);
  std::string count = "1";
  for (int i = 2; i <= 60; ++i) count += " " + std::to_string(i);
  const std::vector<std::string> answers = {
      "", "lantern over", count + " over", "", "lamp, king, moon, river, boat over", "I am Pip. over"};
  for (size_t i = 0; i < answers.size(); ++i) {
    CAPTURE(i);
    const RequestRecord &a = serial.requests[i], &b = continuous.requests[i];
    CHECK(a.finish == Finish::eos);
    if (!answers[i].empty())
      CHECK(a.text == answers[i]);
    else
      CHECK(a.output.size() > 200);  // a long story; it obeys the house rule, too
    CHECK(a.text.ends_with(" over"));
    CHECK(a.output == b.output);
    CHECK(a.logits_hash == b.logits_hash);
  }
  const Summary s = summarize(continuous);
  CHECK(s.prefill_computed == s.prefill_unique);
  CHECK(summarize(serial).prefill_computed > 4 * s.prefill_unique);
}
