// canvas.hpp: RGB pixels, rectangles, lines and letters, and a PNG of them. What every picture is drawn with.
//
// stb writes the PNG and brings the letters (ASCII only). This is the only header that needs stb.
//
// Outer circle.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "error.hpp"
#include "files.hpp"

#if defined(__GNUC__)  // stb is not written for our warnings
  #pragma GCC diagnostic push
  #pragma GCC diagnostic ignored "-Wunused-function"
  #pragma GCC diagnostic ignored "-Wconversion"
  #pragma GCC diagnostic ignored "-Wsign-conversion"
  #pragma GCC diagnostic ignored "-Wshadow"
  #pragma GCC diagnostic ignored "-Wmissing-field-initializers"
#endif
#ifndef INCLUDE_STB_IMAGE_WRITE_H  // who has included it before us brings the implementation, too
  #define STB_IMAGE_WRITE_STATIC
  #define STB_IMAGE_WRITE_IMPLEMENTATION
#endif
#if __has_include(<stb/stb_image_write.h>)
  #include <stb/stb_easy_font.h>
  #include <stb/stb_image_write.h>
#elif __has_include(<stb_image_write.h>)
  #include <stb_easy_font.h>
  #include <stb_image_write.h>
#else
  #error \
      "plot.hpp needs stb_image_write.h and stb_easy_font.h. Debian/Ubuntu: libstb-dev. vcpkg: stb. \
Homebrew has no package: put the two files on the include path."
#endif
#undef STB_IMAGE_WRITE_STATIC
#undef STB_IMAGE_WRITE_IMPLEMENTATION
#if defined(__GNUC__)
  #pragma GCC diagnostic pop
#endif

namespace servelite {

// ---- pixels -----------------------------------------------------------------------------------------

struct Color {
  uint8_t r, g, b;
  bool operator==(const Color&) const = default;
};

inline constexpr Color kWhite{255, 255, 255}, kInk{32, 32, 32}, kGrey{118, 118, 118}, kRule{216, 216, 216},
    kPaper{245, 245, 245}, kKvUsed{158, 178, 205};

/// The way from a to b: 0 is a, 1 is b.
inline Color mix(Color a, Color b, double t) {
  const auto part = [t](uint8_t x, uint8_t y) { return static_cast<uint8_t>(std::lround(x + (y - x) * t)); };
  return {part(a.r, b.r), part(a.g, b.g), part(a.b, b.b)};
}

/// Okabe and Ito's palette, which colour-blind readers can tell apart; lighter from the ninth on.
inline Color request_color(int request) {
  static constexpr Color kPalette[8] = {{230, 159, 0}, {86, 180, 233},  {0, 158, 115},  {213, 94, 0},
                                        {0, 114, 178}, {204, 121, 167}, {240, 228, 66}, {70, 70, 70}};
  const Color c = kPalette[request % 8];
  return request / 8 % 2 ? mix(c, kWhite, 0.5) : c;
}

struct Canvas {
  int width, height;
  std::vector<uint8_t> rgb;  ///< [height][width][3], rows from the top

  Canvas(int w, int h)
      : width(w), height(h), rgb(static_cast<size_t>(w) * static_cast<size_t>(h) * 3, uint8_t{255}) {}
  size_t at(int x, int y) const {
    return (static_cast<size_t>(y) * static_cast<size_t>(width) + static_cast<size_t>(x)) * 3;
  }
  Color get(int x, int y) const { return {rgb[at(x, y)], rgb[at(x, y) + 1], rgb[at(x, y) + 2]}; }
  void set(int x, int y, Color c) {  // what lies outside is cut off
    if (x < 0 || x >= width || y < 0 || y >= height) return;
    rgb[at(x, y)] = c.r, rgb[at(x, y) + 1] = c.g, rgb[at(x, y) + 2] = c.b;
  }
};

inline void fill_rect(Canvas& c, int x, int y, int w, int h, Color color) {
  for (int row = y; row < y + h; ++row)
    for (int column = x; column < x + w; ++column) c.set(column, row, color);
}

/// Diagonal grey lines, rising to the right (slope 1) or falling (-1), every `gap` pixels.
inline void hatch(Canvas& c, int x, int y, int w, int h, int slope, int gap, Color paper) {
  for (int row = y; row < y + h; ++row)
    for (int column = x; column < x + w; ++column)
      c.set(column, row, (column + slope * row + (1 << 20)) % gap < 2 ? kGrey : paper);
}

/// A triangle that points down at (x, y), white-rimmed so that it shows on any colour.
inline void triangle(Canvas& c, int x, int y, int size) {
  for (int i = 0; i <= size + 1; ++i) fill_rect(c, x - i * 2 / 3 - 2, y - i, i * 2 / 3 * 2 + 5, 1, kWhite);
  for (int i = 0; i < size; ++i) fill_rect(c, x - i * 2 / 3, y - i - 1, i * 2 / 3 * 2 + 1, 1, kInk);
}

// ---- letters ----------------------------------------------------------------------------------------

/// What stb_easy_font can draw: printable ASCII. Any other character becomes one question mark.
inline std::string ascii_of(std::string_view text) {
  std::string out;
  for (const char ch : text) {
    const unsigned char u = static_cast<unsigned char>(ch);
    if (u >= 0x80 && u < 0xC0) continue;  // inside a UTF-8 character
    out += u < 0x20 ? ' ' : u < 0x7F ? ch : '?';
  }
  return out;
}

inline int text_width(std::string_view text, int scale) {
  std::string s = ascii_of(text);
  return stb_easy_font_width(s.data()) * scale;
}

/// Text whose top left corner is (x, y); a capital is 7 * scale pixels high.
inline void draw_text(Canvas& c, int x, int y, std::string_view text, int scale, Color color = kInk) {
  struct Vertex {
    float x, y, z;
    uint8_t color[4];
  };
  std::string s = ascii_of(text);
  std::vector<Vertex> quads(s.size() * 80);  // a letter is at most 20 rectangles of four corners
  const int n = stb_easy_font_print(0, 0, s.data(), nullptr, quads.data(),
                                    static_cast<int>(quads.size() * sizeof(Vertex)));
  for (int i = 0; i < n; ++i) {
    const Vertex &a = quads[static_cast<size_t>(i) * 4], &b = quads[static_cast<size_t>(i) * 4 + 2];
    const int left = static_cast<int>(a.x) * scale, top = static_cast<int>(a.y) * scale;
    fill_rect(c, x + left, y + top, static_cast<int>(b.x) * scale - left, static_cast<int>(b.y) * scale - top,
              color);
  }
}

inline void write_png(const std::string& path, const Canvas& c) {
  std::string bytes;
  const auto append = [](void* to, void* data, int n) {
    static_cast<std::string*>(to)->append(static_cast<const char*>(data), static_cast<size_t>(n));
  };
  if (!stbi_write_png_to_func(append, &bytes, c.width, c.height, 3, c.rgb.data(), c.width * 3))
    fail(path, ": cannot encode a PNG of ", c.width, " x ", c.height, " pixels");
  write_file(path, bytes);
}

namespace plot_detail {

inline std::string shortened(std::string text, int width, int scale) {
  text = ascii_of(text);
  if (text_width(text, scale) <= width) return text;
  while (!text.empty() && text_width(text + "...", scale) > width) text.pop_back();
  return text + "...";
}

inline std::string decimal(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

}  // namespace plot_detail

}  // namespace servelite
