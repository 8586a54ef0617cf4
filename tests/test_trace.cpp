// The trace of a run made by hand, read back by a small JSON reader of this file's own.
#include <doctest/doctest.h>

#include <cctype>
#include <map>
#include <servelite/trace.hpp>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

using namespace servelite;

namespace {

/// A JSON value. Strings keep their escapes, except for \" and \\.
struct Value {
  enum Kind { null, truth, number, string, array, object } kind = null;
  double n = 0;
  std::string s;
  std::vector<Value> items;
  std::map<std::string, Value> fields;

  const Value& operator[](const std::string& name) const { return fields.at(name); }
  bool has(const std::string& name) const { return fields.count(name) > 0; }
};

/// Reads strictly what RFC 8259 allows; throws std::runtime_error at the first other byte.
class Reader {
 public:
  explicit Reader(const std::string& text) : text_(text) {}
  Value read() {
    const Value v = value();
    blanks();
    if (at_ != text_.size()) bad();
    return v;
  }

 private:
  [[noreturn]] void bad() const { throw std::runtime_error("not JSON at byte " + std::to_string(at_)); }
  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  void blanks() {
    while (peek() == ' ' || peek() == '\n' || peek() == '\t' || peek() == '\r') ++at_;
  }
  bool take(char c) {
    blanks();
    if (peek() != c || at_ == text_.size()) return false;
    ++at_;
    return true;
  }
  void expect(char c) {
    if (!take(c)) bad();
  }

  Value value() {
    Value v;
    if (take('{')) {
      v.kind = Value::object;
      for (bool more = !take('}'); more; more = take(',')) {
        if (!take('"')) bad();
        const std::string name = string();
        expect(':');
        if (!v.fields.emplace(name, value()).second) bad();  // the same name twice
        blanks();
        if (peek() == '}') return ++at_, v;
      }
      if (!v.fields.empty()) bad();
    } else if (take('[')) {
      v.kind = Value::array;
      for (bool more = !take(']'); more; more = take(',')) {
        v.items.push_back(value());
        blanks();
        if (peek() == ']') return ++at_, v;
      }
      if (!v.items.empty()) bad();
    } else if (take('"')) {
      v.kind = Value::string, v.s = string();
    } else {
      blanks();
      size_t end = at_;
      while (end < text_.size() && (std::isalnum(static_cast<unsigned char>(text_[end])) ||
                                    text_[end] == '-' || text_[end] == '+' || text_[end] == '.'))
        ++end;
      const std::string word = text_.substr(at_, end - at_);
      if (word == "true" || word == "false")
        v.kind = Value::truth, v.n = word == "true";
      else if (word != "null")
        v.kind = Value::number, v.n = number(word);
      at_ = end;
    }
    return v;
  }
  double number(const std::string& word) const {
    size_t used = 0;
    const size_t digit = word.substr(0, 1) == "-" ? 1 : 0;
    if (word.size() <= digit || !std::isdigit(static_cast<unsigned char>(word[digit]))) bad();
    if (word[digit] == '0' && word.size() > digit + 1 &&
        std::isdigit(static_cast<unsigned char>(word[digit + 1])))
      bad();
    const double n = std::stod(word, &used);
    if (used != word.size()) bad();
    return n;
  }
  std::string string() {
    std::string out;
    for (;; ++at_) {
      const char c = peek();
      if (at_ >= text_.size() || static_cast<unsigned char>(c) < 0x20) bad();
      if (c == '"') return ++at_, out;
      if (c == '\\') {
        const char escaped = ++at_ < text_.size() ? text_[at_] : '\0';
        if (std::string("\"\\/bfnrtu").find(escaped) == std::string::npos) bad();
        if (escaped != '"' && escaped != '\\') out += '\\';
      }
      out += text_[at_];
    }
  }

  const std::string& text_;
  size_t at_ = 0;
};

StepRecord step(double begin, double end, std::vector<SpanRecord> spans, KvUse kv, int waiting) {
  StepRecord s;
  s.begin = begin, s.end = end, s.schedule = 0.0005, s.sample = 0.00025;
  s.spans = std::move(spans), s.kv = kv, s.waiting = waiting;
  return s;
}

RequestRecord request(int index, double arrival, double scheduled, std::vector<double> sampled,
                      std::vector<double> out) {
  RequestRecord r;
  r.index = index, r.arrival = arrival, r.first_scheduled = scheduled;
  r.sampled_at = std::move(sampled), r.out_at = std::move(out);
  r.finish = Finish::eos;
  return r;
}

/// A bus of two seats and three steps; request 1 is done after the second. Request 2 was refused.
RunReport bus() {
  RunReport run;
  run.name = "static", run.streamed = false, run.seats = 2, run.kv_capacity_tokens = 64;
  run.steps = {
      step(0.002, 0.012, {{0, 0, Phase::prefill, 6, 0, 0, false}, {1, 1, Phase::prefill, 6, 2, 3, false}},
           {10, 64, 64}, 1),
      step(0.0125, 0.014, {{0, 0, Phase::decode, 1, 0, 0, false}, {1, 1, Phase::decode, 1, 0, 0, false}},
           {12, 64, 64}, 0),
      step(0.015, 0.017, {{0, 0, Phase::decode, 1, 0, 0, false}, {1, 1, Phase::decode, 1, 0, 0, true}},
           {7, 64, 64}, 0)};
  const double back = 0.01725;
  run.requests = {request(0, 0, 0.002, {0.01225, 0.01425, back}, {back, back, back}),
                  request(1, 0.001, 0.002, {0.01225, 0.01425}, {back, back}), request(2, 0.001, -1, {}, {})};
  run.requests[0].user = "Say \"hi\"\n\xFF";
  run.requests[2].finish = Finish::refused;
  return run;
}

std::vector<Value> events_of(const std::vector<RunReport>& runs) {
  const std::string text = chrome_trace(runs);
  const Value all = Reader(text).read();
  REQUIRE(all.kind == Value::object);
  REQUIRE(all["traceEvents"].kind == Value::array);
  return all["traceEvents"].items;
}

/// Events of one kind; with a name, only these.
std::vector<Value> only(const std::vector<Value>& events, const std::string& kind,
                        const std::string& name = "") {
  std::vector<Value> some;
  for (const Value& e : events)
    if (e["ph"].s == kind && (name.empty() || e["name"].s == name)) some.push_back(e);
  return some;
}

}  // namespace

TEST_CASE("trace: the reader of this test accepts JSON and nothing else") {
  for (const char* good : {"{}", "[]", "[1, -2.5e3, 0, null, true, \"a\\n\"]", "{\"a\": {\"b\": [ ]}}"})
    CHECK_NOTHROW(Reader(good).read());
  for (const char* bad : {"", "{", "[1,]", "[1 2]", "{\"a\" 1}", "{\"a\": 1,}", "{\"a\":1,\"a\":2}", "nan",
                          "01", "\"\\x\"", "\"a\nb\"", "[] []", "+1", "inf"})
    CHECK_THROWS_AS(Reader(bad).read(), std::runtime_error);
  const std::string text = "{\"a\": [1, {\"b\": \"\\\"x\\\"\"}]}";
  const Value v = Reader(text).read();
  CHECK(v["a"].items.at(0).n == 1);
  CHECK(v["a"].items.at(1)["b"].s == "\"x\"");
}

TEST_CASE("trace: every event has what the format asks for") {
  const auto events = events_of({bus(), bus()});
  for (const Value& e : events) {
    CHECK(e["name"].kind == Value::string);
    CHECK(e["pid"].kind == Value::number);
    CHECK(e["tid"].kind == Value::number);
    CHECK(e["ts"].n >= 0);
    if (e["ph"].s == "X") CHECK(e["dur"].n >= 0);
    if (e["ph"].s == "i") CHECK(e["s"].s == "t");
  }
}

TEST_CASE("trace: processes and threads have names") {
  RunReport second = bus();
  second.name = "continuous";
  const auto events = events_of({bus(), second});
  std::map<double, std::string> processes;
  std::map<std::pair<double, double>, std::string> threads;
  for (const Value& e : only(events, "M")) {
    if (e["name"].s == "process_name") processes[e["pid"].n] = e["args"]["name"].s;
    if (e["name"].s == "thread_name") threads[{e["pid"].n, e["tid"].n}] = e["args"]["name"].s;
  }
  CHECK(processes == std::map<double, std::string>{{1, "static"}, {2, "continuous"}});
  CHECK(threads.size() == 12);  // two runs, each: the scheduler, 2 seats, 3 requests
  for (const double run : {1, 2}) {
    CHECK(threads[{run, 0}] == "scheduler");
    CHECK(threads[{run, 1}] == "seat 0");
    CHECK(threads[{run, 2}] == "seat 1");
    CHECK(threads[{run, 3}] == "request 0: Say \"hi\"\\n\xEF\xBF\xBD");
  }
  for (const Value& e : events) CHECK(threads.count({e["pid"].n, e["tid"].n}) == 1);
}

TEST_CASE("trace: a slice for every span, and what it was worth") {
  const auto events = events_of({bus()});
  const auto prefill = only(events, "X", "r1 prefill");
  REQUIRE(prefill.size() == 1);
  CHECK(prefill[0]["tid"].n == 2);  // seat 1
  CHECK(prefill[0]["ts"].n == 2000);
  CHECK(prefill[0]["dur"].n == 10000);
  CHECK(prefill[0]["args"]["request"].n == 1);
  CHECK(prefill[0]["args"]["rows"].n == 6);
  CHECK(prefill[0]["args"]["padding"].n == 2);
  CHECK(prefill[0]["args"]["recomputed"].n == 3);
  CHECK(only(events, "X", "r0 decode").size() == 2);
  CHECK(only(events, "X", "r1 decode").size() == 1);
  const auto dead = only(events, "X", "r1 dead");
  REQUIRE(dead.size() == 1);
  CHECK(dead[0]["ts"].n == 15000);
  CHECK(dead[0]["dur"].n == 2000);
  CHECK(only(events, "X").size() == 22);  // 3 steps x 3 of the scheduler, 6 spans, 7 phases of requests
}

TEST_CASE("trace: the scheduler's time is a slice of its own before each step") {
  const auto events = events_of({bus()});
  const auto schedule = only(events, "X", "schedule");
  REQUIRE(schedule.size() == 3);
  CHECK(schedule[0]["ts"].n == 1500);
  CHECK(schedule[0]["dur"].n == 500);
  CHECK(schedule[1]["ts"].n == 12250);  // cut short: before, the last step was still being sampled
  CHECK(schedule[1]["dur"].n == 250);
  CHECK(schedule[1]["args"]["schedule_us"].n == doctest::Approx(500));
  CHECK(only(events, "X", "forward").at(2)["ts"].n == 15000);
  CHECK(only(events, "X", "sample").at(0)["ts"].n == 12000);
  CHECK(only(events, "X", "sample").at(0)["dur"].n == 250);
}

TEST_CASE("trace: the life of a request, and its first token") {
  const auto events = events_of({bus()});
  std::map<std::string, std::pair<double, double>> phases;
  for (const Value& e : only(events, "X"))
    if (e["tid"].n == 4) phases[e["name"].s] = {e["ts"].n, e["dur"].n};  // request 1
  CHECK(phases == std::map<std::string, std::pair<double, double>>{{"queued", {1000, 1000}},
                                                                   {"prefill", {2000, 10250}},
                                                                   {"decode", {12250, 2000}},
                                                                   {"held", {14250, 3000}}});
  const auto first = only(events, "i", "first token out");
  REQUIRE(first.size() == 2);
  CHECK(first[0]["tid"].n == 3);
  CHECK(first[0]["ts"].n == 17250);  // with the bus
  const auto refused = only(events, "i", "not served: refused");
  REQUIRE(refused.size() == 1);
  CHECK(refused[0]["tid"].n == 5);

  RunReport streamed = bus();
  for (RequestRecord& r : streamed.requests) r.out_at = r.sampled_at;
  const auto shuttle = events_of({streamed});
  CHECK(only(shuttle, "X", "held").empty());
  CHECK(only(shuttle, "i", "first token out").at(0)["ts"].n == 12250);
}

TEST_CASE("trace: counters") {
  const auto events = events_of({bus()});
  const auto kv = only(events, "C", "KV tokens"), waiting = only(events, "C", "waiting");
  REQUIRE(kv.size() == 3);
  CHECK(kv[2]["ts"].n == 15000);
  CHECK(kv[2]["args"]["used"].n == 7);
  CHECK(kv[2]["args"]["reserved"].n == 64);
  REQUIRE(waiting.size() == 3);
  CHECK(waiting[0]["args"]["requests"].n == 1);
  CHECK(waiting[1]["args"]["requests"].n == 0);
}

TEST_CASE("trace: slices of a thread never overlap") {
  RunReport odd;  // times that are no whole microseconds, and steps that follow each other at once
  odd.seats = 1;
  double t = 0;
  for (int i = 0; i < 500; ++i) {
    const double begin = t + 1e-7 * (i % 3), end = begin + 1e-5 / 3 * (i % 7);
    odd.steps.push_back(step(begin, end, {{i, 0, Phase::decode, 1, 0, 0, false}}, {1, 1, 1}, 0));
    odd.steps.back().sample = 1e-6 / 7;
    t = end + odd.steps.back().sample;
  }
  const auto events = events_of({bus(), odd});
  std::map<std::pair<double, double>, std::map<double, std::vector<double>>> threads;  // begin -> ends
  for (const Value& e : only(events, "X"))
    threads[{e["pid"].n, e["tid"].n}][e["ts"].n].push_back(e["ts"].n + e["dur"].n);
  CHECK(threads.size() == 7);  // of the bus: the scheduler, 2 seats, 2 requests; of the other: 2
  for (const auto& [thread, slices] : threads) {
    double last = 0;
    for (const auto& [begin, ends] : slices) {
      CHECK(begin >= last - 1e-6);  // the tests add up floating point microseconds
      int real = 0;
      for (const double end : ends) real += end > begin, last = std::max(last, end);
      CHECK(real <= 1);
    }
  }
}

TEST_CASE("trace: nothing to show") {
  CHECK(events_of({}).empty());
  CHECK(only(events_of({RunReport{}}), "M", "process_name").size() == 1);
}
