// StepBatch: the little that it computes itself.
#include <doctest/doctest.h>

#include <servelite/step_batch.hpp>

TEST_CASE("step batch: empty means no spans, rows are counted over all spans") {
  servelite::StepBatch step;
  CHECK(step.empty());
  CHECK(step.rows() == 0);
  step.spans.resize(2);
  step.spans[0].tokens = {7};
  step.spans[1].tokens = {1, 2, 3};
  CHECK_FALSE(step.empty());
  CHECK(step.rows() == 4);
}
