// step_batch.hpp: the one contract between deciding and computing.
//
// A batcher decides what the next forward pass computes and writes it down as a StepBatch. An executor
// computes it. The batcher never touches a float, the executor never sees a queue; whatever stands on
// one side can be exchanged without the other side noticing.
//
//   span 0   seat 0, decode:   1 token   at position 231          wants logits
//   span 1   seat 1, decode:   1 token   at position 40           wants logits
//   span 2   seat 2, prefill: 17 tokens  at positions 208..224    wants the last one's logits
//
// All rows of a step go through a layer together: first every row's K and V are written, then the
// copies are made, then every row attends. So a span may read K/V that another span of the same step
// writes: that is how requests that arrive together share a prefix at once.
//
// Chapter: docs/02_prefill_and_decode.md
#pragma once

#include <vector>

namespace servelite {

enum class Phase { prefill, decode };

/// One sequence's share of a step.
struct Span {
  int request = 0;  ///< index of the request; for the books only, the executor does not look at it
  int seat = 0;     ///< row of the batch it sits in; for the books only
  Phase phase = Phase::prefill;
  std::vector<int> tokens;       ///< ids to compute, at first_position, first_position + 1, ...
  int first_position = 0;        ///< all earlier positions already have their K/V in the cache
  std::vector<int> block_table;  ///< blocks of positions [0, first_position + tokens.size()), in order
  int logits_of = -1;            ///< index into tokens of the row whose logits are wanted; -1: none

  // What the rows are worth, as only the batcher knows (metrics.hpp counts them).
  int padding = 0;    ///< rows at the end that only fill the batch up to its longest prompt
  bool dead = false;  ///< the seat's request has finished; the whole span is wasted
};

/// Before attending in each layer: the first `tokens` slots of block `from` are copied into block `to`
/// (the partly shared last block of a prefix). Made in order, after this step's K/V is written.
struct BlockCopy {
  int from, to, tokens;
};

struct StepBatch {
  std::vector<Span> spans;
  std::vector<BlockCopy> copies;

  bool empty() const { return spans.empty(); }
  int rows() const {
    int n = 0;
    for (const Span& s : spans) n += static_cast<int>(s.tokens.size());
    return n;
  }
};

/// Runs steps. There are three: the CPU model (transformer.hpp), a simulated one, a CUDA one.
class Executor {
 public:
  virtual ~Executor() = default;
  /// Computes every row of the step. logits: [spans that want logits x V], in span order; resized here.
  virtual void run(const StepBatch& step, std::vector<float>& logits) = 0;
  virtual int vocabulary() const = 0;
};

}  // namespace servelite
