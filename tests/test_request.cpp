// Request and Sequence: when an answer ends, and what is refused at the door.
#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <servelite/request.hpp>
#include <string>
#include <vector>

using namespace servelite;

namespace {

Sequence sequence(std::vector<int> prompt, int max_tokens) {
  Sequence s;
  s.request.prompt = prompt, s.request.max_tokens = max_tokens;
  s.tokens = std::move(prompt), s.prompt_tokens = static_cast<int>(s.tokens.size());
  return s;
}

/// The refusal of a request in a context of 20, KV memory of 16 tokens and a vocabulary of 10; "" if there is
/// none.
std::string refusal(Sequence s) {
  const bool refused = refuse_impossible(s, 20, 16, 10);
  CHECK(refused == (s.finish == Finish::refused));
  CHECK(refused == !s.refusal.empty());
  return s.refusal;
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("request: the newest token is known; the answer ends at eos or at its limit") {
  Sequence s = sequence({1, 2, 3}, 3);
  CHECK(s.known() == 3);
  CHECK(s.sampled() == 0);
  accept_token(s, 5, 9);
  CHECK(s.known() == 4);
  CHECK(s.sampled() == 1);
  CHECK(s.finish == Finish::none);
  Sequence ends = s, limited = s;
  accept_token(ends, 9, 9);
  CHECK(ends.finish == Finish::eos);
  CHECK(ends.tokens.back() == 9);  // the end of turn is part of the answer
  accept_token(limited, 5, 9);
  CHECK(limited.finish == Finish::none);
  accept_token(limited, 9, 9);  // eos on the very last allowed token is still eos
  CHECK(limited.finish == Finish::eos);
  accept_token(s, 5, 9), accept_token(s, 5, 9);
  CHECK(s.finish == Finish::length);
  for (const Finish f : {Finish::none, Finish::eos, Finish::length, Finish::refused})
    CHECK(name_of(f) != std::string("?"));
}

TEST_CASE("request: refusals say what was expected and what was found") {
  CHECK(refusal(sequence({1, 2, 3}, 5)).empty());
  CHECK(has(refusal(sequence({}, 5)), "empty prompt"));
  CHECK(has(refusal(sequence({1}, 0)), "max_tokens: expected at least 1, found 0"));
  CHECK(has(refusal(sequence({1}, -3)), "found -3"));

  // The last sampled token is never computed: 10 of prompt and 7 of answer are 16 positions.
  const std::vector<int> ten(10, 1);
  CHECK(refusal(sequence(ten, 7)).empty());
  const std::string memory = refusal(sequence(ten, 8));
  CHECK(has(memory, "17 tokens"));
  CHECK(has(memory, "holds 16"));
  CHECK(has(refusal(sequence(ten, 11)), "KV memory"));  // 20 positions: the context would do
  const std::string context = refusal(sequence(ten, 12));
  CHECK(has(context, "21 positions"));
  CHECK(has(context, "10 of prompt"));
  CHECK(has(context, "12 of answer"));
  CHECK(has(context, "the context holds 20"));
  CHECK(has(refusal(sequence(ten, std::numeric_limits<int>::max())), "2147483656 positions"));

  CHECK(refusal(sequence({0, 9}, 1)).empty());
  CHECK(has(refusal(sequence({0, 10}, 1)), "token id 10"));
  CHECK(has(refusal(sequence({-1}, 1)), "token id -1"));
}

TEST_CASE("request: nonsense sampling settings are refused, one reason is given") {
  Sequence s = sequence({1}, 1);
  s.request.sampling.temperature = std::nanf("");
  CHECK(has(refusal(s), "temperature"));
  s.request.sampling.temperature = -0.5f;
  CHECK(has(refusal(s), "-0.5"));
  s.request.sampling = {};
  s.request.sampling.top_p = 1.5f;
  CHECK(has(refusal(s), "top_p: expected a number from 0 to 1, found 1.5"));
  s.request.sampling.top_k = -1;
  s.request.max_tokens = 0;  // three things wrong: the first is told
  CHECK(refusal(s) == "max_tokens: expected at least 1, found 0");
}
