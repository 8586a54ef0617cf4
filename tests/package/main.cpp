// Uses the library as a stranger would: the target brings the include path, C++20 and OpenMP, nothing else.
#include <servelite/servelite.hpp>

int main() {
  servelite::BlockPool pool(4, 16);
  return pool.allocate() == 0 && pool.free_blocks() == 3 ? 0 : 1;
}
