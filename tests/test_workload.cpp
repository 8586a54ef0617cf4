// The workload format: a file worked out by hand, and every kind of bad line with its number.
#include <doctest/doctest.h>

#include <servelite/workload.hpp>
#include <sstream>
#include <string>
#include <vector>

using namespace servelite;

namespace {

std::vector<Request> read(const std::string& text) {
  std::istringstream in(text);
  return read_workload(in, "scene.txt");
}

/// What the reader says against this text, or "" if it has nothing to say.
std::string complaint(const std::string& text) {
  try {
    read(text);
    return "";
  } catch (const Error& e) {
    return e.what();
  }
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("workload: a file with everything in it") {
  const std::vector<Request> r = read(
      "# a comment\r\n"
      "\n"
      "@pip = Your name is Pip. 2 = 2, a \\| b.  \n"
      "@none =\n"
      "0.5 | @pip | What is the secret word? | 16\n"
      "  0.25\t|  Be brief.  | Count to 9. |64\r\n"
      "1e-2 | | one\\ntwo\\\\n \\| # no comment | 1\n"
      "   # another comment\n"
      "7 | @none | @pip | 1048576");
  REQUIRE(r.size() == 4);
  CHECK(r[0].arrival == 0.5);
  CHECK(r[0].system == "Your name is Pip. 2 = 2, a | b.");
  CHECK(r[0].user == "What is the secret word?");
  CHECK(r[0].max_tokens == 16);
  CHECK(r[0].prompt.empty());
  CHECK(r[1].arrival == 0.25);  // in the order of the file
  CHECK(r[1].system == "Be brief.");
  CHECK(r[1].user == "Count to 9.");
  CHECK(r[1].max_tokens == 64);
  CHECK(r[2].arrival == 0.01);
  CHECK(r[2].system.empty());
  CHECK(r[2].user == "one\ntwo\\n | # no comment");
  CHECK(r[3].system.empty());
  CHECK(r[3].user == "@pip");  // a name only as a system prompt
  CHECK(r[3].max_tokens == 1 << 20);
}

TEST_CASE("workload: a line break at a field's end is kept, blanks around it are not") {
  CHECK(read("0 | | \\n hi \\n | 1")[0].user == "\n hi \n");
}

TEST_CASE("workload: every bad line is named by its number") {
  const std::string good = "0 | | hi | 1\n";
  const auto second = [&](const std::string& line) {
    const std::string said = complaint(good + line + "\n" + good);
    CAPTURE(line);
    CAPTURE(said);
    CHECK(said.rfind("scene.txt:2: ", 0) == 0);
    return said;
  };
  CHECK(has(second("0 | hi | 1"), "expected 4 fields 'arrival | system | user | max tokens', found 3"));
  CHECK(has(second("0 | | hi | 1 | 2"), "found 5"));
  CHECK(has(second("hello"), "found 1"));
  CHECK(has(second("0 | | hi \\| 1"), "found 3"));  // an escaped bar does not part
  CHECK(has(second("@pip"), "found 1"));
  for (const std::string number :
       {"", "x", "-1", "nan", "inf", "1 2", "1s", "1e10", "1e999", "0x10", "1,5"}) {
    CAPTURE(number);
    CHECK(has(second(number + " | | hi | 1"),
              "arrival: expected a number from 0 to 86400, found '" + number + "'"));
  }
  for (const std::string number : {"", "x", "0", "-1", "1.5", "1048577", "99999999999", "1e3"}) {
    CAPTURE(number);
    CHECK(has(second("0 | | hi | " + number),
              "max tokens: expected a number from 1 to 1048576, found '" + number + "'"));
  }
  CHECK(has(second("0 | | | 1"), "user: expected some text"));
  CHECK(has(second("0 | @pip | hi | 1"), "system prompt @pip is not defined above"));
  CHECK(has(second("@pip = one | two"), "expected one text, found 2 fields"));
  CHECK(has(second("0 | | tab\\there | 1"), "after a backslash, found 't'"));
  CHECK(has(second("0 | | a \\ b | 1"), "after a backslash, found ' '"));
  CHECK(has(second("0 | | hi | 1\\"), "after a backslash, found ''"));
  CHECK(has(second("@pip = text\\"), "after a backslash, found ''"));
  CHECK(complaint("@a = x\n0 | @a | hi | 1\n@a = y\n") == "scene.txt:3: system prompt @a is already defined");
}

TEST_CASE("workload: an empty file, a missing file") {
  CHECK(has(complaint(""), "scene.txt: expected at least one request"));
  CHECK(has(complaint("# nothing\n@a = x\n"), "expected at least one request"));
  CHECK_THROWS_WITH_AS(load_workload("no/such/file"), doctest::Contains("found 'no/such/file'"), Error);
}

TEST_CASE("workload: the six-request scene is one system prompt, six questions, within a moment") {
  const std::vector<Request> six = load_workload("six");
  REQUIRE(six.size() == 6);
  for (size_t i = 0; i < 6; ++i) {
    CHECK(six[i].system == six[0].system);
    CHECK_FALSE(six[i].user.empty());
    CHECK(six[i].arrival >= (i == 0 ? 0 : six[i - 1].arrival));
    CHECK(six[i].arrival < 0.1);
    CHECK(six[i].max_tokens >= 200);
    for (size_t j = 0; j < i; ++j) CHECK(six[i].user != six[j].user);
  }
}

TEST_CASE("workload: a byte order mark, an @ that is text, a directory") {
  std::istringstream in("\xEF\xBB\xBF@pip = \\@pip speaks.\n0 | \\@pip | \\@home | 4\n0 | @pip | hi | 4\n");
  const std::vector<Request> r = read_workload(in, "w");
  REQUIRE(r.size() == 2);
  CHECK(r[0].system == "@pip");
  CHECK(r[0].user == "@home");
  CHECK(r[1].system == "@pip speaks.");
  CHECK_THROWS_WITH_AS(load_workload("."), "workload: expected a file, . is a directory", Error);
}
