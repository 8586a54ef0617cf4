// test_corpus.cpp: is every training answer right, and is the examination really unseen?
//
// The test knows nothing of how the corpus is made: it reads the question and the system prompt as
// text, works out the answer from tables of its own, and compares.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <servelite/model.hpp>
#include <servelite/workload.hpp>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "../models/corpus.hpp"

namespace corpus = servelite::corpus;

namespace {

/// The text between `before` and `after`, or "" when `before` does not occur.
std::string between(const std::string& text, const std::string& before, const std::string& after) {
  const std::size_t at = text.find(before);
  if (at == std::string::npos) return "";
  const std::size_t start = at + before.size();
  return text.substr(start, text.find(after, start) - start);
}

/// The first that is stated of several phrasings, each up to `after`.
std::string stated(const std::string& text, const std::vector<std::string>& phrasings,
                   const std::string& after) {
  for (const std::string& phrasing : phrasings)
    if (const std::string found = between(text, phrasing, after); !found.empty()) return found;
  return "";
}

std::vector<int> numbers_in(const std::string& text) {
  std::vector<int> numbers;
  for (std::size_t i = 0; i < text.size(); ++i)
    if (text[i] >= '0' && text[i] <= '9') {
      std::size_t used = 0;
      numbers.push_back(std::stoi(text.substr(i), &used));
      i += used;
    }
  return numbers;
}

/// The items of a comma-separated list after `before`.
std::vector<std::string> list_in(const std::string& question, const std::string& before) {
  std::stringstream rest(between(question, before, "."));
  std::vector<std::string> items;
  for (std::string item; std::getline(rest, item, ',');)
    items.push_back(item[0] == ' ' ? item.substr(1) : item);
  return items;
}

std::string with_commas(const std::vector<std::string>& items) {
  std::string text;
  for (const std::string& item : items) text += (text.empty() ? "" : ", ") + item;
  return text;
}

const std::map<std::string, std::string> kFacts = {{"France", "Paris"},
                                                   {"Italy", "Rome"},
                                                   {"Spain", "Madrid"},
                                                   {"Japan", "Tokyo"},
                                                   {"Egypt", "Cairo"},
                                                   {"Greece", "Athens"},
                                                   {"Norway", "Oslo"},
                                                   {"Peru", "Lima"},
                                                   {"Cuba", "Havana"},
                                                   {"Austria", "Vienna"},
                                                   {"Portugal", "Lisbon"},
                                                   {"Ireland", "Dublin"},
                                                   {"grass", "green"},
                                                   {"snow", "white"},
                                                   {"coal", "black"},
                                                   {"the sky", "blue"},
                                                   {"a lemon", "yellow"},
                                                   {"blood", "red"},
                                                   {"chocolate", "brown"},
                                                   {"ash", "grey"},
                                                   {"a carrot", "orange"},
                                                   {"a plum", "purple"},
                                                   {"cow", "moo"},
                                                   {"cat", "meow"},
                                                   {"dog", "woof"},
                                                   {"duck", "quack"},
                                                   {"sheep", "baa"},
                                                   {"pig", "oink"},
                                                   {"lion", "roar"},
                                                   {"owl", "hoot"},
                                                   {"bee", "buzz"},
                                                   {"snake", "hiss"},
                                                   {"Monday", "Tuesday"},
                                                   {"Tuesday", "Wednesday"},
                                                   {"Wednesday", "Thursday"},
                                                   {"Thursday", "Friday"},
                                                   {"Friday", "Saturday"},
                                                   {"Saturday", "Sunday"},
                                                   {"Sunday", "Monday"}};

const std::vector<std::vector<std::string>> kOpposites = {
    {"hot", "cold"},    {"big", "small"},   {"up", "down"},    {"left", "right"},   {"day", "night"},
    {"black", "white"}, {"happy", "sad"},   {"fast", "slow"},  {"open", "closed"},  {"full", "empty"},
    {"new", "old"},     {"wet", "dry"},     {"hard", "soft"},  {"high", "low"},     {"long", "short"},
    {"near", "far"},    {"strong", "weak"}, {"first", "last"}, {"wide", "narrow"},  {"loud", "quiet"},
    {"clean", "dirty"}, {"good", "bad"},    {"in", "out"},     {"on", "off"},       {"yes", "no"},
    {"win", "lose"},    {"push", "pull"},   {"buy", "sell"},   {"start", "finish"}, {"north", "south"},
    {"east", "west"},   {"top", "bottom"}};

std::string opposite_of(const std::string& word) {
  for (const auto& pair : kOpposites) {
    if (pair[0] == word) return pair[1];
    if (pair[1] == word) return pair[0];
  }
  return "?";
}

/// What a fact question asks about.
std::string fact_subject(const std::string& question) {
  const std::string mark = question.substr(question.size() - 1);
  if (question.find(" make?") != std::string::npos) return between(question, "does the ", " make?");
  if (question.find(" sound?") != std::string::npos) return between(question, "does the ", " sound?");
  return stated(question,
                {"capital of ", "colour of ", "What colour is ", "Which colour has ", "sound of the ",
                 "comes after ", "day follows ", "day after "},
                mark);
}

std::string name_in(const std::string& system) {
  return stated(system, {"Your name is ", "You are called "}, ".");
}
std::string secret_in(const std::string& system) {
  return stated(system, {"The secret word is ", "Remember the secret word "}, ".");
}
std::string place_in(const std::string& system) {
  return stated(system, {"You work at the ", "Your place of work is the "}, ".");
}
std::string hours_in(const std::string& system) {
  return stated(system, {"The doors are open from ", "Guests may come from "}, ".");
}
std::string first_word_in(const std::string& system) {
  return stated(system, {"Begin every answer with the word ", "Start each answer with the word "}, ".");
}
std::string last_word_in(const std::string& system) {
  return stated(system, {"End every answer with the word ", "Close each answer with the word "}, ".");
}

std::string obey(const std::string& system, std::string answer) {
  if (const std::string word = first_word_in(system); !word.empty()) return word + "! " + answer;
  if (const std::string word = last_word_in(system); !word.empty()) return answer + " " + word;
  return answer;
}

/// The answer before the house rule, from nothing but the texts.
std::string solve(const std::string& system, const std::string& question) {
  const auto has = [&](const char* part) { return question.find(part) != std::string::npos; };
  if (has("Count")) {
    const std::vector<int> n = numbers_in(question);
    std::string answer;
    for (int i = n[0]; i <= n[1]; ++i) answer += std::to_string(i) + " ";
    return answer.substr(0, answer.size() - 1);
  }
  if (has("times")) {
    const std::string word = between(question, question[0] == 'R' ? "Repeat " : "Write ", " ");
    std::string answer = "1 " + word;
    for (int i = 2; i <= numbers_in(question)[0]; ++i) answer += " " + std::to_string(i) + " " + word;
    return answer;
  }
  if (has("pell ")) {
    const std::string word = stated(question, {"Spell the word ", "How do you spell ", "Spell "},
                                    question.substr(question.size() - 1));
    std::string answer(1, word[0]);
    for (char c : word.substr(1)) answer += std::string("-") + c;
    return answer;
  }
  if (has("Reverse") || has("backwards")) {
    std::vector<std::string> words = list_in(question, ": ");
    std::reverse(words.begin(), words.end());
    return with_commas(words);
  }
  if (has("Sort") || has("Put in order")) {
    std::vector<int> numbers = numbers_in(question);
    std::sort(numbers.begin(), numbers.end());
    std::vector<std::string> words;
    for (int n : numbers) words.push_back(std::to_string(n));
    return with_commas(words);
  }
  if (has(" plus ") || has("Add ")) {
    const std::vector<int> n = numbers_in(question);
    return std::to_string(n[0] + n[1]);
  }
  if (has("opposite of "))
    return opposite_of(between(question, "opposite of ", question.substr(question.size() - 1)));
  if (has("Who are you?") || has("your name")) return "I am " + name_in(system) + ".";
  if (has("secret word")) return secret_in(system);
  if (has("work")) return "At the " + place_in(system) + ".";
  if (has("When ")) return "From " + hours_in(system) + ".";
  const auto fact = kFacts.find(fact_subject(question));
  return fact == kFacts.end() ? "?" : fact->second;
}

/// What an examination question must share with no training question: its text and, where the
/// answer rests on the system prompt, the statement it rests on.
std::string meeting(const std::string& family, const std::string& system, const std::string& question) {
  std::string on;
  if (family == "name" || family == "secret") on = name_in(system) + "|" + secret_in(system);
  if (family == "place") on = place_in(system);
  if (family == "hours") on = hours_in(system);
  if (family == "rule") on = first_word_in(system) + last_word_in(system);
  return on + "|" + question;
}

std::vector<corpus::Conversation> conversations(std::uint64_t seed, int n) {
  corpus::Rng rng{seed};
  std::vector<corpus::Conversation> all;
  for (int i = 0; i < n; ++i) all.push_back(corpus::make_conversation(rng));
  return all;
}

/// The training data in small; made once, read by several tests.
const std::vector<corpus::Conversation>& training() {
  static const std::vector<corpus::Conversation> all = conversations(11, 20000);
  return all;
}

int tokens_of(const corpus::Conversation& c) {
  int sum = corpus::estimate_tokens(c.system);
  for (const auto& t : c.turns)
    sum += corpus::estimate_tokens(t.question) + corpus::estimate_tokens(t.answer) + 5;
  return sum;
}

}  // namespace

TEST_CASE("corpus: the generator is splitmix64, with its published numbers") {
  corpus::Rng zero{0};
  CHECK(zero.next() == 0xE220A8397B1DCDAFu);
  CHECK(zero.next() == 0x6E789E6AA1B965F4u);
  CHECK(zero.next() == 0x06C45D188009454Fu);
  corpus::Rng other{1234567};
  CHECK(other.next() == 6457827717110365317u);
}

TEST_CASE("corpus: token estimates worked out by hand") {
  CHECK(corpus::estimate_tokens("") == 0);
  CHECK(corpus::estimate_tokens("fox") == 1);
  CHECK(corpus::estimate_tokens("Paris") == 3);    // P, then 4/3, rounded up
  CHECK(corpus::estimate_tokens("1 2 13") == 6);   // four digits, two spaces before digits
  CHECK(corpus::estimate_tokens("12 over") == 4);  // two digits, then 5/3
}

TEST_CASE("corpus: every closed answer follows from question and system prompt") {
  int checked = 0;
  for (std::size_t i = 0; i < 5000; ++i) {
    const corpus::Conversation& c = training()[i];
    for (const corpus::Turn& turn : c.turns) {
      if (!turn.closed) continue;
      ++checked;
      const std::string expected = obey(c.system, solve(c.system, turn.question));
      if (turn.answer == expected) continue;
      FAIL_CHECK("system: ", c.system, "\nquestion: ", turn.question, "\nanswer: ", turn.answer,
                 "\nexpected: ", expected);
    }
  }
  CHECK(checked > 20000);
}

TEST_CASE("corpus: the examination asks every family, is right, and was never seen in training") {
  std::set<std::string> seen;
  for (const auto& c : training())
    for (const auto& turn : c.turns) {
      if (corpus::held_out(turn.key)) FAIL_CHECK("held out, yet in training: ", turn.key);
      seen.insert(meeting(turn.family, c.system, turn.question));
      seen.insert(meeting("", c.system, turn.question));  // whatever the turn is called
    }
  corpus::Rng rng{5};
  std::set<std::string> names;
  for (const corpus::FamilyInfo& family : corpus::families()) {
    CAPTURE(family.name);
    names.insert(family.name);
    const std::vector<corpus::EvalItem> items = corpus::make_eval(rng, family.name, 150);
    REQUIRE(items.size() == 150);
    std::set<std::string> different;
    int without_system = 0;
    for (const corpus::EvalItem& item : items) {
      CAPTURE(item.system);
      CAPTURE(item.question);
      CHECK(item.family == family.name);
      CHECK(item.closed == family.closed);
      CHECK(seen.count(meeting(item.family, item.system, item.question)) == 0);
      if (item.closed) CHECK(item.answer == obey(item.system, solve(item.system, item.question)));
      different.insert(item.system + item.question);
      without_system += item.system.empty();
    }
    CHECK(different.size() == items.size());
    CHECK((without_system == 0) == family.needs_system);
  }
  CHECK(names == std::set<std::string>{"count", "repeat", "spell", "reverse", "sort", "add", "fact",
                                       "opposite", "story", "name", "secret", "place", "hours", "rule"});
  CHECK(corpus::make_eval(rng, "count", 0).empty());
  CHECK_THROWS_WITH(corpus::make_eval(rng, "poem", 1), doctest::Contains("found 'poem'"));
}

TEST_CASE("corpus: about one key in eight is held out, always the same ones") {
  int held = 0;
  for (int i = 0; i < 80000; ++i) held += corpus::held_out("key " + std::to_string(i));
  CHECK(held > 9600);  // 10000 expected, standard deviation 94
  CHECK(held < 10400);
}

TEST_CASE("corpus: what is not stated is not asked") {
  int without = 0, missing = 0;
  for (const auto& c : training()) {
    const bool ruled = !(first_word_in(c.system) + last_word_in(c.system)).empty();
    without += c.system.empty();
    missing += !c.system.empty() && (name_in(c.system).empty() || secret_in(c.system).empty() ||
                                     place_in(c.system).empty() || hours_in(c.system).empty());
    for (const auto& turn : c.turns) {
      if (turn.family == "name") CHECK(!name_in(c.system).empty());
      if (turn.family == "secret") CHECK(!secret_in(c.system).empty());
      if (turn.family == "place") CHECK(!place_in(c.system).empty());
      if (turn.family == "hours") CHECK(!hours_in(c.system).empty());
      if (turn.family == "rule") CHECK(ruled);
    }
  }
  CHECK(without > 2600);  // 15% of 20000, standard deviation 51
  CHECK(without < 3400);
  CHECK(missing > 2150);  // 15% of the rest, standard deviation 47
  CHECK(missing < 2950);
}

TEST_CASE("corpus: every entry of every table is trained in some phrasing") {
  std::map<std::string, int> asked;
  for (const auto& c : training())
    for (const auto& turn : c.turns) {
      const std::string plain = turn.closed ? solve(c.system, turn.question) : "";
      ++asked[turn.family + "|" + plain];
      if (turn.family == "count") ++asked["count up to|" + plain.substr(plain.rfind(' ') + 1)];
      if (turn.family == "place")  // "At the harbour library."
        for (const auto* words : {&corpus::kPlaceKinds, &corpus::kPlaceNouns})
          for (const std::string& word : *words)
            if (plain.find(" " + word) != std::string::npos) ++asked["place|" + word];
      if (turn.family != "rule") continue;
      if (turn.question.find("opposite") != std::string::npos) ++asked["opposite|" + plain];
      if (kFacts.count(fact_subject(turn.question))) ++asked["fact|" + plain];
      ++asked["rule|" + first_word_in(c.system) + last_word_in(c.system)];
    }
  const auto at_least = [&](const std::string& entry, int n) {
    if (asked[entry] < n) FAIL_CHECK(entry, " was asked ", asked[entry], " times");
  };
  for (const auto* words : {&corpus::kSecrets, &corpus::kAnimals, &corpus::kThings})
    for (const std::string& word : *words) at_least("spell|" + solve("", "Spell " + word + "."), 10);
  for (const std::string& word : corpus::kNames) at_least("name|I am " + word + ".", 10);
  for (const std::string& word : corpus::kSecrets) at_least("secret|" + word, 10);
  for (const auto* words : {&corpus::kPlaceKinds, &corpus::kPlaceNouns})
    for (const std::string& word : *words) at_least("place|" + word, 10);
  for (const std::string& word : corpus::kFirstWords) at_least("rule|" + word, 10);
  for (const std::string& word : corpus::kLastWords) at_least("rule|" + word, 10);
  for (const auto& [subject, answer] : kFacts) at_least("fact|" + answer, 10);
  for (const auto& pair : kOpposites)
    for (const std::string& word : pair) at_least("opposite|" + word, 10);
  for (int n = 2; n <= 60; ++n) at_least("count up to|" + std::to_string(n), 10);
}

TEST_CASE("corpus: lengths spread from one word to over 200 tokens, and everything fits the context") {
  int one_word = 0, medium = 0, over_200 = 0, usual = 0;
  int shortest_system = 1000, longest_system = 0;
  for (const auto& c : training()) {
    const int tokens = tokens_of(c);
    REQUIRE(tokens < 1000);
    REQUIRE(!c.turns.empty());
    REQUIRE(c.turns.size() <= 8);
    usual += tokens >= 200 && tokens <= 700;
    if (!c.system.empty()) {
      shortest_system = std::min(shortest_system, corpus::estimate_tokens(c.system));
      longest_system = std::max(longest_system, corpus::estimate_tokens(c.system));
    }
    for (const auto& turn : c.turns) {
      const int length = corpus::estimate_tokens(turn.answer);
      one_word += turn.answer.find(' ') == std::string::npos;
      medium += length >= 20 && length <= 100;
      over_200 += length > 200;
    }
  }
  CHECK(usual > 18000);
  CHECK(one_word > 10000);
  CHECK(medium > 10000);
  CHECK(over_200 > 1500);
  CHECK(shortest_system >= 85);
  CHECK(longest_system > 350);
  CHECK(longest_system <= 400);
}

TEST_CASE("corpus: every text is plain printable ASCII on one line, without doubled or outer spaces") {
  const auto check = [](const std::string& text) {
    const bool plain = std::all_of(text.begin(), text.end(), [](char c) { return c >= 32 && c < 127; });
    const bool tidy = text.find("  ") == std::string::npos && text.find('%') == std::string::npos &&
                      text.find('|') == std::string::npos &&
                      (text.empty() || (text.front() != ' ' && text.back() != ' '));
    if (!plain || !tidy) FAIL_CHECK("not plain: ", text);
  };
  for (const auto& c : training()) {
    check(c.system);
    for (const auto& turn : c.turns) {
      check(turn.question);
      check(turn.answer);
      REQUIRE(!turn.question.empty());
      REQUIRE(!turn.answer.empty());
    }
  }
}

TEST_CASE("corpus: a story follows its clock and ends") {
  const std::vector<std::string> week = {"On Monday", "On Tuesday",  "On Wednesday", "On Thursday",
                                         "On Friday", "On Saturday", "On Sunday"};
  const std::vector<std::string> day = {"In the morning", "At noon", "In the evening"};
  corpus::Rng rng{3};
  int many = 0;
  for (int i = 0; i < 300; ++i) {
    const corpus::Turn turn = corpus::make_turn(rng, "story", corpus::Persona{});
    const bool is_long = turn.question.find("long") != std::string::npos;
    CAPTURE(turn.answer);
    std::size_t at = 0;
    for (const std::string& time : is_long ? week : day) {
      at = turn.answer.find(time + " the ", at);
      REQUIRE(at != std::string::npos);
    }
    // The hero of the question is the hero of the story, from the first sentence to the last.
    const std::string hero = turn.question.substr(turn.question.rfind(' ') + 1);
    CHECK(turn.answer.find(hero.substr(0, hero.size() - 1) + " who lived") != std::string::npos);
    const std::string end = "the " + hero.substr(0, hero.size() - 1) + " was happy.";
    CHECK(turn.answer.substr(turn.answer.size() - end.size()) == end);
    const int tokens = corpus::estimate_tokens(turn.answer);
    CHECK(tokens >= (is_long ? 200 : 60));
    CHECK(tokens <= (is_long ? 330 : 200));
    many += is_long;
  }
  CHECK(many > 100);
  CHECK(many < 200);
}

TEST_CASE("corpus: names and words of the house rule can be told apart by their first token") {
  const servelite::Tokenizer tokenizer = servelite::load_model(SERVELITE_MODEL).tokenizer;
  const int space = tokenizer.encode("7")[0];  // digits never merge: a space, then the digit
  REQUIRE(tokenizer.encode("7").size() == 2);
  std::set<int> first;
  for (const std::string& name : corpus::kNames) {
    CAPTURE(name);
    CHECK(tokenizer.encode(name)[0] != space);
    CHECK(first.insert(tokenizer.encode(name)[0]).second);
  }
  for (const std::string& word : corpus::kLastWords) {
    CAPTURE(word);
    CHECK(tokenizer.encode(word)[0] != space);
  }
}

TEST_CASE("corpus: the same seed gives the same bytes everywhere") {
  std::uint64_t hash = 0xCBF29CE484222325u;
  const auto add = [&](const std::string& text) {
    for (char c : text + "\n") hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
  };
  for (const auto& c : conversations(1, 1000)) {
    add(c.system);
    for (const auto& turn : c.turns) {
      add(turn.family);
      add(turn.question);
      add(turn.answer);
    }
  }
  CHECK(hash == 14801373344056668665u);  // any change of the corpus changes this, and the trained model
  CHECK(conversations(1, 5)[4].system != conversations(2, 5)[4].system);
}

TEST_CASE("corpus: the six users share a prompt in the training style and ask for short and long answers") {
  const std::vector<servelite::Request> six = servelite::six_requests();
  REQUIRE(six.size() == 6);
  const std::string& system = six[0].system;
  CHECK(corpus::estimate_tokens(system) >= 180);
  CHECK(corpus::estimate_tokens(system) <= 230);
  CHECK(name_in(system) == "Pip");
  CHECK(secret_in(system) == "lantern");
  CHECK(place_in(system) == "harbour library");
  CHECK(hours_in(system) == "8 to 17");
  CHECK(last_word_in(system) == "over");
  std::istringstream sentences(system);
  int known = 0, all = 0;
  for (std::string s; std::getline(sentences >> std::ws, s, '.'); ++all)
    known += std::count(corpus::kFillers.begin(), corpus::kFillers.end(), s + ".") > 0;
  CHECK(all - known == 5);  // the five statements; the rest are fillers of the training data
  int stories = 0, shortest = 1000, longest = 0;
  for (const servelite::Request& request : six) {
    CHECK(request.system == system);
    if (request.user.rfind("Tell me a long story about ", 0) == 0) {
      ++stories;
      continue;
    }
    const std::string answer = obey(system, solve(system, request.user));
    CAPTURE(answer);
    CHECK(answer.find('?') == std::string::npos);  // one of the families that solve() knows
    shortest = std::min(shortest, corpus::estimate_tokens(answer));
    longest = std::max(longest, corpus::estimate_tokens(answer));
  }
  CHECK(stories == 2);
  CHECK(shortest <= 4);
  CHECK(longest >= 100);
}
