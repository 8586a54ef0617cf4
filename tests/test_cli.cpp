// The options of the example programs: what is read, what is refused and in which words.
#include <doctest/doctest.h>

#include <algorithm>
#include <climits>
#include <filesystem>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "../examples/cli.hpp"

using namespace servelite;

namespace {

Options make_options() {
  Options o("program", "what it is for");
  o.add("seats", "N", "8", "rows of the batch");
  o.add("rate", "R", "0.5", "requests per second");
  o.add("out", "FILE", "out.png", "where to");
  o.add("verbose", "", "", "say more");
  return o;
}

bool parse(Options& o, const std::vector<std::string>& words) {
  std::vector<std::string> copy = {"program"};
  copy.insert(copy.end(), words.begin(), words.end());
  std::vector<char*> argv;
  for (std::string& w : copy) argv.push_back(w.data());
  argv.push_back(nullptr);
  return o.parse(static_cast<int>(copy.size()), argv.data());
}

template <class F>
std::string message_of(F f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

std::string parse_error(const std::vector<std::string>& words) {
  Options o = make_options();
  return message_of([&] { parse(o, words); });
}

std::string integer_error(const std::string& value) {
  Options o = make_options();
  parse(o, {"--seats=" + value});
  return message_of([&] { o.integer("seats", 1, 64); });
}

std::string real_error(const std::string& value) {
  Options o = make_options();
  parse(o, {"--rate=" + value});
  return message_of([&] { o.real("rate", 0, 100); });
}

}  // namespace

TEST_CASE("cli: defaults hold where nothing is given") {
  Options o = make_options();
  CHECK(parse(o, {}));
  CHECK(o.integer("seats", 1, 64) == 8);
  CHECK(o.real("rate", 0, 1) == 0.5);
  CHECK(o.text("out") == "out.png");
  CHECK_FALSE(o.flag("verbose"));
  CHECK_FALSE(o.given("seats"));
}

TEST_CASE("cli: --name value and --name=value, flags, the last one wins") {
  Options o = make_options();
  CHECK(parse(o, {"--seats", "3", "--rate=2.25", "--verbose", "--out", "a=b.png"}));
  CHECK(o.integer("seats", 1, 64) == 3);
  CHECK(o.real("rate", 0, 100) == 2.25);
  CHECK(o.flag("verbose"));
  CHECK(o.text("out") == "a=b.png");
  CHECK(o.given("seats"));
  CHECK(o.given("verbose"));
  CHECK(parse(o, {"--seats", "4", "--seats=5", "--out=x=y", "--rate", "1e1"}));
  CHECK(o.integer("seats", 1, 64) == 5);
  CHECK(o.text("out") == "x=y");
  CHECK(o.real("rate", 0, 100) == 10.0);
  CHECK(parse(o, {"--out="}));
  CHECK(o.text("out").empty());
  CHECK(parse(o, {"--seats", "-5"}));
  CHECK(o.integer("seats", -10, 10) == -5);
}

TEST_CASE("cli: whole numbers are read completely, within their limits") {
  CHECK(integer_error("1") == "no error");
  CHECK(integer_error("64") == "no error");
  CHECK(integer_error("12x") == "--seats: expected a whole number from 1 to 64, found '12x'");
  for (const char* bad : {"", "0", "65", "-1", " 8", "8 ", "8\n", "4.0", "1e1", "0x10", "abc", "-", "--rate",
                          "8,0", "2147483648", "-2147483649", "99999999999999999999999", "4294967297"}) {
    CAPTURE(std::string(bad));
    CHECK(integer_error(bad) ==
          "--seats: expected a whole number from 1 to 64, found '" + std::string(bad) + "'");
  }
  Options o = make_options();
  parse(o, {"--seats=2147483647"});
  CHECK(o.integer("seats", INT_MIN, INT_MAX) == INT_MAX);
  parse(o, {"--seats=-2147483648"});
  CHECK(o.integer("seats", INT_MIN, INT_MAX) == INT_MIN);
}

TEST_CASE("cli: numbers are read completely, within their limits") {
  for (const char* good : {"0", "100", "2.5", ".5", "1e-3", "99.999"}) CHECK(real_error(good) == "no error");
  CHECK(real_error("1.5s") == "--rate: expected a number from 0 to 100, found '1.5s'");
  for (const char* bad :
       {"", "-0.1", "100.1", "nan", "inf", "-inf", "1e999", "1e", "1,5", " 1", "1 ", "x", "1.2.3"}) {
    CAPTURE(std::string(bad));
    CHECK(real_error(bad) == "--rate: expected a number from 0 to 100, found '" + std::string(bad) + "'");
  }
}

TEST_CASE("cli: what is no option is refused") {
  CHECK(parse_error({"--seat", "3"}) ==
        "unknown option '--seat': expected one of --seats --rate --out --verbose --help");
  CHECK(parse_error({"--SEATS=3"}).rfind("unknown option '--SEATS'", 0) == 0);
  CHECK(parse_error({"--"}).rfind("unknown option '--'", 0) == 0);
  CHECK(parse_error({"--=3"}).rfind("unknown option '--'", 0) == 0);
  for (const char* word : {"7", "-s", "", "-", "seats=3"})
    CHECK(parse_error({word}) == "expected an option such as --help, found '" + std::string(word) + "'");
  CHECK(parse_error({"--seats"}) == "--seats: expected a value (N), found none");
  CHECK(parse_error({"--out=x", "--rate"}) == "--rate: expected a value (R), found none");
  CHECK(parse_error({"--verbose=yes"}) == "--verbose: expected no value, found 'yes'");
  CHECK(parse_error({"--verbose", "yes"}) == "expected an option such as --help, found 'yes'");
  Options none("program", "no options at all");
  CHECK(message_of([&] { parse(none, {"x"}); }) == "expected an option such as --help, found 'x'");
}

TEST_CASE("cli: a program that asks for an option it did not declare hears of it") {
  Options o = make_options();
  CHECK_THROWS_AS(o.text("nothing"), Error);
  CHECK_THROWS_AS(o.flag("nothing"), Error);
}

TEST_CASE("cli: --help stops the parse, whatever follows") {
  Options o = make_options();
  CHECK_FALSE(parse(o, {"--help", "--no-such"}));
  CHECK_FALSE(parse(o, {"-h"}));
  CHECK_FALSE(parse(o, {"--seats", "3", "--help"}));
  CHECK(parse(o, {"--out", "--help"}));  // here it is the value
  CHECK(o.text("out") == "--help");
}

TEST_CASE("cli: run_main passes the status on; any exception becomes status 2") {
  CHECK(run_main("program", [] { return 0; }) == 0);
  CHECK(run_main("program", [] { return 7; }) == 7);
  CHECK(run_main("program", []() -> int { fail("this line", " belongs to the test"); }) == 2);
  CHECK(run_main("program", []() -> int { throw std::runtime_error("this line belongs to the test"); }) == 2);
  CHECK(run_main("program", []() -> int { throw std::bad_alloc(); }) == 2);
}

TEST_CASE("cli: --threads is bounded by what the machine could use") {
  const int most = std::max(16, 4 * default_threads());
  const auto threads = [](const std::string& value) {
    Options o("program", "");
    o.add("threads", "N", "0", "");
    parse(o, {"--threads", value});
    return o.threads();
  };
  CHECK(threads("0") == 0);
  CHECK(threads(std::to_string(most)) == most);
  CHECK_THROWS_AS(threads(std::to_string(most + 1)), Error);
  CHECK_THROWS_AS(threads("-1"), Error);
}

TEST_CASE("cli: outputs are checked before the work") {
  const auto complaint = [](const std::string& a, const std::string& b) {
    Options o("program", "");
    o.add("json", "F", "", "");
    o.add("png", "F", "", "");
    parse(o, {"--json=" + a, "--png=" + b});
    return message_of([&] { o.check_outputs({"json", "png"}); });
  };
  CHECK(complaint("", "") == "no error");  // none asked for, and none twice
  CHECK(complaint("test_cli.json", "test_cli.png") == "no error");
  CHECK_FALSE(std::filesystem::exists("test_cli.json"));
  CHECK(complaint("test_cli.json", "test_cli.json") ==
        "--png: expected a file of its own, found test_cli.json a second time");
  CHECK(complaint("", ".") == ".: cannot write: it is a directory");
  CHECK(complaint("no/such/folder/x", "").rfind("no/such/folder/x: cannot write: ", 0) == 0);
}

TEST_CASE("cli: what could steer a terminal is made visible") {
  CHECK(printable("\x1b[31mred\x07\x7f\r") == "?[31mred???");
  CHECK(printable("two\nlines\tand \xC3\xA9") == "two\nlines\tand \xC3\xA9");
}
