// files.hpp: writing files so that no half file is ever left under the final name. Outer circle.
#pragma once

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>

#include "error.hpp"

namespace servelite {

/// Writes a whole file: into path + ".partial" first, then renamed. On failure Error says why, and neither
/// file is left.
inline void write_file(const std::string& path, std::string_view bytes) {
  const std::string partial = path + ".partial";
  std::FILE* file = std::fopen(partial.c_str(), "wb");
  if (!file) fail(path, ": cannot write: ", std::strerror(errno));
  const bool written =
      std::fwrite(bytes.data(), 1, bytes.size(), file) == bytes.size() && std::fflush(file) == 0;
  int error = errno;
  const bool closed = std::fclose(file) == 0;
  if (written && !closed) error = errno;
  if (written && closed && std::rename(partial.c_str(), path.c_str()) == 0) return;
  if (written && closed) error = errno;
  std::remove(partial.c_str());
  fail(path, ": cannot write: ", std::strerror(error));
}

}  // namespace servelite
