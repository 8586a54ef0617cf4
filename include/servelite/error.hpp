// error.hpp: the one exception of the library.
//
// Bad input from outside (a file, an argument, a request) throws servelite::Error. Its text says
// what was expected, what was found and where (file and byte offset, line, option name), so that a
// program can print it on one line and stop. A broken invariant of our own is an assertion instead.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace servelite {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Throws Error with all arguments written one after the other.
template <class... Parts>
[[noreturn]] inline void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw Error(text.str());
}

}  // namespace servelite
