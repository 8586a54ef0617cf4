// Files are written whole or not at all, and only where a file belongs.
#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <servelite/files.hpp>

using namespace servelite;
namespace fs = std::filesystem;

namespace {

std::string content(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

}  // namespace

TEST_CASE("files: written whole, through a link, never in place of what is no file") {
  const fs::path folder = fs::path("test_files.tmp");
  fs::remove_all(folder);
  fs::create_directory(folder);
  const std::string file = (folder / "a").string(), link = (folder / "link").string();

  check_writable(file);
  CHECK(fs::is_empty(folder));  // asking leaves nothing
  write_file(file, "one");
  CHECK(content(file) == "one");
  fs::create_symlink("a", link);
  write_file(link, "two");
  CHECK(fs::is_symlink(link));
  CHECK(content(file) == "two");
  CHECK(std::distance(fs::directory_iterator(folder), {}) == 2);  // no .partial left

  const std::string missing = (folder / "no" / "b").string();
  for (const auto& bad : {folder.string(), missing}) {
    CHECK_THROWS_AS(check_writable(bad), Error);
    CHECK_THROWS_AS(write_file(bad, "x"), Error);
  }
  CHECK_THROWS_WITH_AS(write_file(folder.string(), "x"), "test_files.tmp: cannot write: it is a directory",
                       Error);
  fs::remove_all(folder);
  if (fs::exists("/dev/null")) {
    const FilePlaces at = file_places("/dev/null");
    CHECK(at.first == "/dev/null");  // no /dev/null.partial that would be renamed over it
    write_file("/dev/null", "x");
    CHECK(fs::is_character_file("/dev/null"));
  }
}
