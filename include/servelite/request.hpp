// request.hpp: a request, the sequence it becomes while it is served, and what every batcher can do.
//
// Life of a request:
//   arrival -> (queue time) -> first scheduled -> (prefill) -> first token -> decode -> last token
//
// Two lengths are never to be confused. Tokens *known*: the prompt plus everything sampled. Tokens
// *computed*: those whose K/V is in the cache. The newest sampled token is known, not yet computed:
//
//   prompt of 5, three tokens sampled:   p p p p p s s s       known    8
//                                        ^ ^ ^ ^ ^ ^ ^         computed 7
//
// Chapter: docs/10_side_by_side.md
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "block_pool.hpp"
#include "sampler.hpp"
#include "step_batch.hpp"

namespace servelite {

/// What a user sends. Either text, which serve() turns into prompt ids on arrival, or ids.
struct Request {
  double arrival = 0;  ///< seconds after the run's start
  std::string system, user;
  std::vector<int> prompt;  ///< ids; when empty, made from system and user
  int max_tokens = 256;     ///< the answer ends here at the latest
  SamplingParams sampling;
};

/// Why a request's answer ended. `none`: it has not.
enum class Finish { none, eos, length, refused };

inline const char* name_of(Finish f) {
  switch (f) {
    case Finish::none: return "none";
    case Finish::eos: return "eos";
    case Finish::length: return "length";
    case Finish::refused: return "refused";
  }
  return "?";
}

/// A request while it is served. The batcher keeps the books; serve() owns it.
struct Sequence {
  int index = 0;  ///< number of the request within the run
  Request request;
  std::vector<int> tokens;  ///< known: prompt, then sampled (the newest included)
  int prompt_tokens = 0;    ///< how many of `tokens` are the prompt
  int computed = 0;         ///< positions whose K/V is in the cache (the newest sampled token is not)
  std::vector<int> blocks;  ///< block table, this sequence's references
  int seat = -1;
  int shared_tokens = 0;    ///< prompt tokens whose K/V was found in the prefix cache, not computed
  int computed_before = 0;  ///< the most positions it ever had computed: above `computed` after a preemption
  Finish finish = Finish::none;
  std::string refusal;  ///< for Finish::refused: why
  int preemptions = 0;  ///< how often its blocks were taken from it
  bool left = false;    ///< the answer may leave: at once when finished, or with the bus

  int known() const { return static_cast<int>(tokens.size()); }
  int sampled() const { return known() - prompt_tokens; }
};

/// Appends a sampled token and says whether the answer ends with it.
inline void accept_token(Sequence& s, int token, int eos) {
  s.tokens.push_back(token);
  if (token == eos)
    s.finish = Finish::eos;
  else if (s.sampled() >= s.request.max_tokens)
    s.finish = Finish::length;
}

/// How the KV memory stands after a step, in tokens. used: computed tokens of sequences being served,
/// a shared one counted once. reserved: what is set aside for them and could serve nobody else.
struct KvUse {
  int used = 0, reserved = 0, capacity = 0;
};

/// Decides the steps. Never touches a float.
class Batcher {
 public:
  virtual ~Batcher() = default;
  /// Takes a request in. One that can never be served is finished at once as refused.
  virtual void submit(Sequence& sequence, double now) = 0;
  /// The next forward pass; empty if there is nothing to do at time `now`.
  virtual StepBatch schedule(double now) = 0;
  /// After the pass: one token per span that wanted logits, in span order.
  virtual void complete(const StepBatch& step, const std::vector<int>& tokens, double now) = 0;
  /// When an empty schedule() is worth asking again without a new arrival (a bus that leaves on time).
  virtual double wake_at() const { return std::numeric_limits<double>::infinity(); }
  /// Whether answers leave token by token, or all at once when the batch is done.
  virtual bool streams() const { return true; }
  virtual int seats() const = 0;
  virtual KvUse kv_use() const = 0;
  virtual const std::deque<Sequence*>& waiting() const = 0;
};

/// Refuses what can never be served, with the numbers. Returns true if it was refused.
/// context: the most positions a sequence may have. The last sampled token is never computed, so a
/// request occupies prompt + max_tokens - 1 positions at most.
inline bool refuse_impossible(Sequence& s, int context, int kv_tokens, int vocabulary) {
  std::ostringstream why;
  const int64_t most = static_cast<int64_t>(s.prompt_tokens) + s.request.max_tokens - 1;
  const auto stray =
      std::find_if(s.tokens.begin(), s.tokens.end(), [&](int id) { return id < 0 || id >= vocabulary; });
  if (s.prompt_tokens == 0)
    why << "empty prompt: expected at least one token";
  else if (s.request.max_tokens < 1)
    why << "max_tokens: expected at least 1, found " << s.request.max_tokens;
  else if (most > context)
    why << "needs " << most << " positions (" << s.prompt_tokens << " of prompt, " << s.request.max_tokens
        << " of answer, the last of which takes none), the context holds " << context;
  else if (most > kv_tokens)
    why << "needs KV for " << most << " tokens, the whole KV memory holds " << kv_tokens;
  else if (stray != s.tokens.end())
    why << "prompt token id " << *stray << " is outside the vocabulary of " << vocabulary;
  else
    try {
      check_sampling(s.request.sampling);
    } catch (const Error& e) {
      why << e.what();
    }
  s.refusal = why.str();
  if (!s.refusal.empty()) s.finish = Finish::refused;
  return !s.refusal.empty();
}

}  // namespace servelite
