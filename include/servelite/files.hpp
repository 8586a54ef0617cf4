// files.hpp: writing files so that no half file is ever left under the final name. Outer circle.
#pragma once

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string>
#include <string_view>

#include "error.hpp"

namespace servelite {

/// Where write_file() writes first. A link is followed, and what is no file (a pipe, /dev/stdout) is written
/// to as it is: renaming would put a file in its place.
struct FilePlaces {
  std::string final, first;
};
inline FilePlaces file_places(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code unknown;  // then path stays as it is, and opening it says what is wrong
  const fs::file_type type = fs::status(path, unknown).type();
  if (type == fs::file_type::directory) fail(path, ": cannot write: it is a directory");
  if (type != fs::file_type::regular && type != fs::file_type::not_found) return {path, path};
  const fs::path real = fs::weakly_canonical(path, unknown);
  const std::string final = unknown || real.empty() ? path : real.string();
  return {final, final + ".partial"};
}

/// Throws Error if write_file(path) could not write: to be asked before the work, not after.
inline void check_writable(const std::string& path) {
  const FilePlaces at = file_places(path);
  if (at.first == at.final) return;  // opening a pipe could wait for its reader
  std::FILE* file = std::fopen(at.first.c_str(), "wb");
  if (!file) fail(path, ": cannot write: ", std::strerror(errno));
  std::fclose(file);
  std::remove(at.first.c_str());
}

/// Writes a whole file: into path + ".partial" first, then renamed. On failure Error says why, and neither
/// file is left.
inline void write_file(const std::string& path, std::string_view bytes) {
  const auto [final, partial] = file_places(path);
  std::FILE* file = std::fopen(partial.c_str(), "wb");
  if (!file) fail(path, ": cannot write: ", std::strerror(errno));
  const bool written =
      std::fwrite(bytes.data(), 1, bytes.size(), file) == bytes.size() && std::fflush(file) == 0;
  int error = errno;
  const bool closed = std::fclose(file) == 0;
  if (written && !closed) error = errno;
  if (written && closed && (partial == final || std::rename(partial.c_str(), final.c_str()) == 0)) return;
  if (written && closed) error = errno;
  if (partial != final) std::remove(partial.c_str());
  fail(path, ": cannot write: ", std::strerror(error));
}

}  // namespace servelite
