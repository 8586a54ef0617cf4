// cli.hpp: the options of the example programs.
//
//   Options o("10_side_by_side", "the same requests served three ways");
//   o.add("seats", "N", "8", "rows of the batch");
//   o.parse(argc, argv);                        // --seats 4, --seats=4, --help
//   int seats = o.integer("seats", 1, 1024);    // Error: --seats: expected ..., found '12x'
#pragma once

#include <algorithm>
#include <cstdio>
#include <exception>
#include <locale>
#include <servelite/error.hpp>
#include <servelite/files.hpp>
#include <servelite/machine.hpp>
#include <sstream>
#include <string>
#include <vector>

namespace servelite {

class Options {
 public:
  Options(std::string program, std::string what) : program_(std::move(program)), what_(std::move(what)) {}

  /// An option with a value. A flag has the placeholder "".
  void add(const std::string& name, const std::string& placeholder, const std::string& value,
           const std::string& help) {
    options_.push_back({name, placeholder, value, help, false});
  }

  /// False if only the help was asked for (and has been printed).
  bool parse(int argc, char** argv) {
    for (int i = 1; i < argc; ++i) {
      const std::string argument = argv[i];
      if (argument == "--help" || argument == "-h") {
        print_help();
        return false;
      }
      if (argument.rfind("--", 0) != 0) fail("expected an option such as --help, found '", argument, "'");
      const size_t equals = argument.find('=');
      Option& option = find(argument.substr(2, equals == std::string::npos ? equals : equals - 2));
      option.given = true;
      if (option.placeholder.empty()) {
        if (equals != std::string::npos)
          fail("--", option.name, ": expected no value, found '", argument.substr(equals + 1), "'");
        option.value = "1";
      } else if (equals != std::string::npos) {
        option.value = argument.substr(equals + 1);
      } else if (i + 1 < argc) {
        option.value = argv[++i];
      } else {
        fail("--", option.name, ": expected a value (", option.placeholder, "), found none");
      }
    }
    return true;
  }

  const std::string& text(const std::string& name) { return find(name).value; }
  bool flag(const std::string& name) { return find(name).value == "1"; }
  bool given(const std::string& name) { return find(name).given; }
  int integer(const std::string& name, int low, int high) {
    return number<int>(name, low, high, "a whole number");
  }
  double real(const std::string& name, double low, double high) {
    return number<double>(name, low, high, "a number");
  }

  /// --threads: 0 is all cores; many more than there are cores would only wait for each other.
  int threads() { return integer("threads", 0, std::max(16, 4 * default_threads())); }
  /// Says before the work, not after it, if an output cannot be written or two would be the same file.
  void check_outputs(const std::vector<std::string>& names) {
    std::vector<std::string> paths;
    for (const std::string& name : names) {
      if (text(name).empty()) continue;
      if (std::find(paths.begin(), paths.end(), text(name)) != paths.end())
        fail("--", name, ": expected a file of its own, found ", text(name), " a second time");
      paths.push_back(text(name));
      check_writable(text(name));
    }
  }

 private:
  struct Option {
    std::string name, placeholder, value, help;
    bool given;
  };

  template <class Number>
  Number number(const std::string& name, Number low, Number high, const char* what) {
    const std::string& value = find(name).value;
    std::istringstream in(value);
    in.imbue(std::locale::classic());
    Number n{};
    if (!(in >> std::noskipws >> n) || in.peek() != std::istringstream::traits_type::eof() ||
        !(n >= low && n <= high))
      fail("--", name, ": expected ", what, " from ", low, " to ", high, ", found '", value, "'");
    return n;
  }

  Option& find(const std::string& name) {
    for (Option& o : options_)
      if (o.name == name) return o;
    std::string known;
    for (const Option& o : options_) known += " --" + o.name;
    fail("unknown option '--", name, "': expected one of", known, " --help");
  }

  void print_help() const {
    std::printf("%s: %s\n\noptions:\n", program_.c_str(), what_.c_str());
    for (const Option& o : options_) {
      const std::string left = "--" + o.name + (o.placeholder.empty() ? "" : " " + o.placeholder);
      std::printf("  %-20s %s%s%s%s\n", left.c_str(), o.help.c_str(),
                  o.value.empty() || o.placeholder.empty() ? "" : " (default ",
                  o.placeholder.empty() ? "" : o.value.c_str(),
                  o.value.empty() || o.placeholder.empty() ? "" : ")");
    }
  }

  std::string program_, what_;
  std::vector<Option> options_;
};

/// Text from a user or a model for the terminal: control characters, which could steer it, become '?'.
inline std::string printable(std::string text) {
  for (char& c : text)
    if ((static_cast<unsigned char>(c) < ' ' && c != '\n' && c != '\t') || c == '\x7f') c = '?';
  return text;
}

/// Runs f(); an Error becomes one line on stderr and exit status 2.
template <class F>
int run_main(const char* program, F&& f) {
  try {
    const int status = f();
    if (std::fflush(stdout) != 0 || std::ferror(stdout)) fail("cannot write to standard output");
    return status;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s: %s\n", program, e.what());
    return 2;
  }
}

#ifndef SERVELITE_MODEL  // set by CMake to the shipped model's place in the source tree
  #define SERVELITE_MODEL "models/servelite-tiny.gguf"
#endif

}  // namespace servelite
