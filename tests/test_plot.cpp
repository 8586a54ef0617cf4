// The timeline: pictures of runs made by hand, read back from the PNG with another decoder, pixel by pixel.
#include <doctest/doctest.h>

#include <ctime>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <servelite/plot.hpp>
#include <set>
#include <string>
#include <vector>

#if defined(__GNUC__)
  #pragma GCC diagnostic push
  #pragma GCC diagnostic ignored "-Wunused-function"
  #pragma GCC diagnostic ignored "-Wconversion"
  #pragma GCC diagnostic ignored "-Wsign-conversion"
  #pragma GCC diagnostic ignored "-Wshadow"
#endif
#define STB_IMAGE_STATIC
#define STB_IMAGE_IMPLEMENTATION
#define STBI_ONLY_PNG
#if __has_include(<stb/stb_image.h>)
  #include <stb/stb_image.h>
#else
  #include <stb_image.h>
#endif
#if defined(__GNUC__)
  #pragma GCC diagnostic pop
#endif

using namespace servelite;
using namespace servelite::plot_detail;

namespace {

std::string file_of(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

uint32_t big_endian(const std::string& bytes, size_t at) {
  uint32_t value = 0;
  for (size_t i = 0; i < 4; ++i) value = value << 8 | static_cast<unsigned char>(bytes.at(at + i));
  return value;
}

Canvas decoded(const std::string& png) {
  int w = 0, h = 0, channels = 0;
  stbi_uc* pixels = stbi_load_from_memory(reinterpret_cast<const stbi_uc*>(png.data()),
                                          static_cast<int>(png.size()), &w, &h, &channels, 3);
  REQUIRE(pixels != nullptr);
  Canvas c(w, h);
  std::copy(pixels, pixels + c.rgb.size(), c.rgb.begin());
  stbi_image_free(pixels);
  return c;
}

/// How many pixels of the rectangle have the colour.
int count(const Canvas& c, int x, int y, int w, int h, Color color) {
  int n = 0;
  for (int row = y; row < y + h; ++row)
    for (int column = x; column < x + w; ++column) n += c.get(column, row) == color;
  return n;
}

RequestRecord request(int index, double arrival, double first_out, double last_out) {
  RequestRecord r;
  r.index = index, r.arrival = arrival, r.first_scheduled = arrival;
  r.sampled_at = r.out_at = {first_out, last_out};
  r.user = "question " + std::to_string(index), r.finish = Finish::eos;
  return r;
}

StepRecord step(double begin, double end, std::vector<SpanRecord> spans, int used, int reserved) {
  StepRecord s;
  s.begin = begin, s.end = end, s.spans = std::move(spans), s.kv = {used, reserved, 100};
  return s;
}

/// Two seats, 100 ms. Seat 0: request 0 prefills, then decodes. Seat 1: request 1's prefill is half padding,
/// then the seat is dead, then empty.
RunReport two_seats() {
  RunReport run;
  run.name = "by hand", run.seats = 2, run.kv_capacity_tokens = 100;
  run.requests = {request(0, 0, 0.040, 0.100), request(1, 0.010, 0.070, 0.070)};
  run.steps = {step(0, 0.040,
                    {{0, 0, Phase::prefill, 8, 0, 0, false}, {1, 1, Phase::prefill, 8, 4, 0, false}}, 25, 50),
               step(0.040, 0.070,
                    {{0, 0, Phase::decode, 1, 0, 0, false}, {1, 1, Phase::decode, 1, 0, 0, true}}, 75, 75),
               step(0.070, 0.100, {{0, 0, Phase::decode, 1, 0, 0, false}}, 75, 100)};
  return run;
}

/// x of a time in a picture whose last mark is at 100 ms: the axis spans pixels 384 to 1572 and 101 ms.
int x_at(double ms) { return 384 + static_cast<int>(ms / 101 * 1188); }

}  // namespace

TEST_CASE("plot: the canvas cuts off what lies outside") {
  Canvas c(4, 3);
  fill_rect(c, -5, -5, 7, 6, kInk);  // columns 0 and 1 of row 0
  CHECK(count(c, 0, 0, 4, 3, kInk) == 2);
  CHECK(c.get(1, 0) == kInk);
  CHECK(c.get(2, 0) == kWhite);
  CHECK(c.get(1, 1) == kWhite);
  hatch(c, 2, 1, 100, 100, 1, 4, kPaper);
  CHECK(count(c, 2, 1, 2, 2, kGrey) + count(c, 2, 1, 2, 2, kPaper) == 4);
  CHECK(mix({0, 100, 200}, {100, 0, 200}, 0.25) == Color{25, 75, 200});
}

TEST_CASE("plot: the two hatchings slope in opposite directions") {
  Canvas c(20, 20);
  hatch(c, 0, 0, 20, 20, 1, 5, kWhite);
  for (int y = 1; y < 19; ++y)
    for (int x = 1; x < 19; ++x) CHECK(c.get(x, y) == c.get(x + 1, y - 1));
  hatch(c, 0, 0, 20, 20, -1, 5, kWhite);
  for (int y = 1; y < 19; ++y)
    for (int x = 1; x < 19; ++x) CHECK(c.get(x, y) == c.get(x + 1, y + 1));
  CHECK(count(c, 0, 0, 20, 20, kGrey) == 160);  // two pixels of every five
}

TEST_CASE("plot: letters stay inside their width and accept any bytes") {
  CHECK(ascii_of("a\nb\x7f") == "a b?");
  CHECK(ascii_of("gr\xC3\xBC\xC3\x9F \xF0\x9F\x99\x82") == "gr?? ?");  // one mark for each character
  CHECK(text_width("", 2) == 0);
  CHECK(text_width("seat 0", 3) == 3 * text_width("seat 0", 1));
  std::string all;
  for (int ch = 1; ch < 256; ++ch) all += static_cast<char>(ch);
  Canvas c(1600, 40);
  draw_text(c, 10, 10, all, 2);
  CHECK(count(c, 0, 0, 1600, 40, kInk) > 1000);
  CHECK(count(c, 0, 0, 10, 40, kInk) == 0);
  CHECK(count(c, 10 + text_width(all, 2), 0, 1590 - text_width(all, 2), 40, kInk) == 0);
  const std::string last = "WWWW";  // nothing of a long text is dropped: its end looks like it does alone
  Canvas alone(200, 30), after(2000, 30);
  const std::string before(100, '8');
  draw_text(alone, 0, 5, last, 2);
  draw_text(after, 0, 5, before + last, 2);
  const int x = text_width(before, 2);
  for (int y = 0; y < 30; ++y)
    for (int i = 0; i < text_width(last, 2); ++i) REQUIRE(alone.get(i, y) == after.get(x + i, y));
  CHECK(shortened("short", 500, 2) == "short");
  const std::string cut = shortened("a question that is much too long", 150, 2);
  CHECK(cut.size() > 5);
  CHECK(cut.substr(cut.size() - 3) == "...");
  CHECK(text_width(cut, 2) <= 150);
}

TEST_CASE("plot: colours of requests") {
  CHECK(request_color(0) == Color{230, 159, 0});  // Okabe and Ito: orange, sky blue, bluish green
  CHECK(request_color(1) == Color{86, 180, 233});
  CHECK(request_color(2) == Color{0, 158, 115});
  std::set<std::vector<int>> seen;
  for (int i = 0; i < 16; ++i) {
    const Color c = request_color(i);
    seen.insert({c.r, c.g, c.b});
  }
  CHECK(seen.size() == 16);
  CHECK(request_color(16) == request_color(0));
}

TEST_CASE("plot: the PNG shows what happened, where it happened") {
  const std::string path = (std::filesystem::temp_directory_path() / "servelite_test_plot.png").string();
  const std::vector<RunReport> runs{two_seats()};
  plot_timeline(path, runs, "title");
  const std::string png = file_of(path);
  std::filesystem::remove(path);
  CHECK(!std::filesystem::exists(path + ".partial"));

  REQUIRE(png.size() > 33);
  CHECK(png.substr(0, 8) == "\x89PNG\r\n\x1a\n");
  CHECK(png.substr(12, 4) == "IHDR");
  const TimelineLayout l = timeline_layout(runs);
  CHECK(big_endian(png, 16) == 1600);
  CHECK(big_endian(png, 20) == static_cast<uint32_t>(l.height));
  const Canvas c = decoded(png);
  CHECK(c.width == 1600);
  CHECK(c.height == l.height);

  REQUIRE(l.strips.size() == 1);
  REQUIRE(l.strips[0].rows == 2);
  const int seat0 = l.row_y(0, 0) + 13, seat1 = l.row_y(0, 1) + 13;  // the middle of 30 pixel high bars
  REQUIRE(l.row_height == 34);

  const Color orange{230, 159, 0}, sky{86, 180, 233};
  CHECK(count(c, x_at(2), seat0, x_at(34) - x_at(2), 1, orange) == x_at(34) - x_at(2));
  CHECK(c.get(x_at(20), l.row_y(0, 0)) ==
        mix(orange, {0, 0, 0}, 0.45));  // a prefill is full height, outlined
  CHECK(c.get(x_at(60), seat0) == mix(orange, kWhite, 0.3));
  CHECK(c.get(x_at(60), l.row_y(0, 0) + 2) == kPaper);  // a decode is not

  CHECK(c.get(x_at(10), seat1) == sky);  // 20 ms of prompt, 20 ms of padding: 4 rows of 8
  CHECK(c.get(x_at(19), seat1) == sky);
  const int padding = count(c, x_at(22), seat1, 100, 5, kGrey),
            dead = count(c, x_at(45), seat1, 100, 5, kGrey);
  CHECK(padding == 200);  // two of every five pixels, the rest white
  CHECK(count(c, x_at(22), seat1, 100, 5, kWhite) == 300);
  CHECK(dead > 100);
  CHECK(dead < 150);  // about two of eight, the rest grey
  CHECK(count(c, x_at(45), seat1, 100, 5, kRule) == 500 - dead);
  CHECK(count(c, x_at(75), seat1, 20, 10, kPaper) == 200);  // an empty seat

  const auto mark = [&](double ms, int seat) {  // ink of the triangle, above its tip
    return count(c, x_at(ms) - 8, l.row_y(0, seat), 17, 10, kInk);
  };
  CHECK(mark(40, 0) > 60);
  CHECK(mark(70, 1) > 60);
  CHECK(mark(50, 0) == 0);
  CHECK(mark(40, 1) == 0);
  CHECK(c.get(x_at(10) + 1, l.strips[0].top + 3) == mix(sky, {0, 0, 0}, 0.2));  // arrival of request 1

  const int top = l.strips[0].kv_top, bottom = l.strips[0].bottom;
  REQUIRE(bottom - top == 72);
  const auto used = [&](double ms) { return count(c, x_at(ms), top, 1, 72, kKvUsed); };
  CHECK(used(20) == 18);  // 25 tokens of 100
  CHECK(used(90) == 54);
  CHECK(c.get(x_at(20), bottom - 37) == kInk);  // reserved: 50 tokens
  CHECK(c.get(x_at(20), bottom - 30) == kPaper);
  CHECK(c.get(x_at(90), top - 1) == kInk);
}

TEST_CASE("plot: all strips share the time axis") {
  RunReport fast;
  fast.name = "fast", fast.seats = 1, fast.kv_capacity_tokens = 100;
  fast.requests = {request(1, 0, 0.050, 0.050)};
  fast.steps = {step(0, 0.050, {{1, 0, Phase::decode, 1, 0, 0, false}}, 1, 1)};
  RunReport slow = fast;
  slow.name = "slow", slow.requests[0].out_at = {0.100}, slow.steps[0].end = 0.050;
  slow.steps.push_back(step(0.050, 0.100, {{2, 0, Phase::decode, 1, 0, 0, false}}, 1, 1));
  const std::vector<RunReport> runs{fast, slow};
  const Canvas c = draw_timeline(runs, "two");
  const TimelineLayout l = timeline_layout(runs);
  const Color sky = mix({86, 180, 233}, kWhite, 0.3);
  int last[2] = {0, 0};
  for (const size_t strip : {0u, 1u})
    for (int x = l.left; x < l.right; ++x)
      if (c.get(x, l.row_y(strip, 0) + 22) == sky) last[strip] = x;
  CHECK(last[0] >= x_at(50) - 2);
  CHECK(last[0] <= x_at(50) + 1);
  CHECK(std::abs(last[1] - last[0]) <= 2);  // the first run's end mark covers its last column
}

TEST_CASE("plot: a column shows what took most of it") {
  RunReport run;
  run.seats = 1, run.kv_capacity_tokens = 100;
  const auto turn = [&](double begin, double end, int who) {
    run.steps.push_back(step(begin, end, {{who, 0, Phase::decode, 1, 0, 0, false}}, 1, 1));
  };
  for (int i = 0; i < 20000; i += 2) {  // 10,000 turns each over 20 s, many to a pixel; the second is longer
    turn(0.001 * i, 0.001 * i + 0.0007, 0);
    turn(0.001 * i + 0.0007, 0.001 * i + 0.002, 1);
  }
  turn(25.0, 25.00001, 2);  // alone, and far below a pixel wide
  const auto cells = seat_cells(run, timeline_layout({run}), 1);
  REQUIRE(cells.size() == 1);
  REQUIRE(cells[0].size() == 1188);
  int n[3] = {0, 0, 0}, none = 0;
  for (const Cell& cell : cells[0]) ++(cell.request < 0 ? none : n[cell.request]);
  CHECK(n[0] == 0);
  CHECK(n[1] >= 939);  // 20 of 25.25 s on 1188 columns: 940.99
  CHECK(n[1] <= 942);
  CHECK(n[2] == 1);
  CHECK(none == 1188 - n[1] - n[2]);
}

TEST_CASE("plot: nothing to show, and too much") {
  CHECK(draw_timeline({}, "nothing").height > 100);
  RunReport empty;
  CHECK(draw_timeline({empty, empty}, "").height > 300);
  RunReport refused;
  refused.requests.resize(3);
  refused.requests[1].finish = Finish::refused, refused.requests[1].index = 1;
  CHECK(draw_timeline({refused}, std::string(5000, 'W')).height > 200);
  RunReport wide;
  wide.steps = {step(0, 1, {{123456, 100000, Phase::decode, 0, 0, 0, false}}, 1000, 1000)};  // above capacity
  wide.requests = {request(123456, 0, 1, 1)};
  const Canvas c = draw_timeline({wide}, "wide");
  CHECK(c.height > 1000);
  CHECK(c.height < 2000);  // at most 256 seats are shown
}

TEST_CASE("plot: ten thousand steps of eight seats are quick") {
  RunReport run;
  run.seats = 8, run.kv_capacity_tokens = 100;
  for (int i = 0; i < 10000; ++i) {
    StepRecord s = step(0.001 * i, 0.001 * i + 0.0009, {}, i % 100, 100);
    for (int seat = 0; seat < 8; ++seat)
      s.spans.push_back({i / 50 + seat, seat, Phase::decode, 1, 0, 0, false});
    run.steps.push_back(s);
  }
  for (int i = 0; i < 300; ++i) run.requests.push_back(request(i, 0, 0.05 * i, 0.05 * i + 0.04));
  const std::clock_t begin = std::clock();
  const Canvas c = draw_timeline({run}, "long");
  CHECK(static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC < 3);  // 0.1 s where it was written
  CHECK(c.height < 1600);
}

TEST_CASE("plot: a file that cannot be written is an Error that names it") {
  const std::string path = (std::filesystem::temp_directory_path() / "no such folder" / "x.png").string();
  try {
    plot_timeline(path, {two_seats()}, "title");
    FAIL("expected an Error");
  } catch (const Error& e) {
    CHECK(std::string(e.what()).find(path) != std::string::npos);
  }
}
