// The roofline: where its parts lie, worked out by hand from the axes' formula, read back from the pixels.
#include <doctest/doctest.h>

#include <servelite/roofline.hpp>

using namespace servelite;

namespace {

bool same(Color a, Color b) { return a.r == b.r && a.g == b.g && a.b == b.b; }

}  // namespace

TEST_CASE("roofline: points and roof lie where logarithms put them") {
  Roofline r{
      "title", "below", 10, 1000, "10 GB/s", "1000 GFLOP/s", {{"low", 1, 5, 2}, {"high", 1000, 900, 4}}};
  const Canvas c = draw_roofline(r);
  // x from 10^-1 at 130 to 10^4 at 1160: 206 pixels a power of ten. y from 1 at 700 to 10^4 at 110: 147.5.
  CHECK(same(c.get(336, 596), request_color(2)));  // (1, 5): 130 + 206, 700 - 147.5 * 0.699
  CHECK(same(c.get(954, 264), request_color(4)));  // (1000, 900): 130 + 4 * 206, 700 - 147.5 * 2.954
  CHECK(same(c.get(542, 405), kInk));              // the slope at 10 operations a byte: 100 GFLOP/s
  CHECK(same(c.get(748, 257), kInk));              // the ridge at 1000 / 10 = 100
  CHECK(same(c.get(1100, 257), kInk));             // flat from there
  CHECK_FALSE(same(c.get(900, 211), kInk));        // the slope ends at the ridge
}
