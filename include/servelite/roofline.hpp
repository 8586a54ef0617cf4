// roofline.hpp: the picture of the benchmark (Williams, Waterman and Patterson, 2009).
//
//   GFLOP/s |          ________ peak arithmetic
//    (log)  |        /     o         prefill: on the roof's flat part
//           |   o  /
//           |    /   <- memory: GB/s times FLOP/byte
//           |  /o                    decode of one row: on the slope
//           +------------------- FLOP per byte read (log)
//
// Outer circle. Chapter: docs/benchmarks.md
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "canvas.hpp"

namespace servelite {

struct RooflinePoint {
  std::string label;
  double intensity;  ///< operations per byte
  double gflops;
  int color;  ///< see request_color()
};

struct Roofline {
  std::string title, below;      ///< the line under the title says machine and model
  double read_gbs, peak_gflops;  ///< the two parts of the roof
  std::string read_name, peak_name;
  std::vector<RooflinePoint> points;
};

namespace plot_detail {

inline void line(Canvas& c, double x0, double y0, double x1, double y1, int thick, Color color) {
  const int n = static_cast<int>(std::max(std::abs(x1 - x0), std::abs(y1 - y0))) + 1;
  for (int i = 0; i <= n; ++i) {
    const double t = static_cast<double>(i) / n;
    fill_rect(c, static_cast<int>(std::lround(x0 + (x1 - x0) * t)) - thick / 2,
              static_cast<int>(std::lround(y0 + (y1 - y0) * t)) - thick / 2, thick, thick, color);
  }
}

inline void disc(Canvas& c, int x, int y, int radius, Color color) {
  for (int dy = -radius; dy <= radius; ++dy)
    for (int dx = -radius; dx <= radius; ++dx)
      if (dx * dx + dy * dy <= radius * radius) c.set(x + dx, y + dy, color);
}

/// 1, 10, 100, 0.1: as short as can be.
inline std::string power_of_ten(int exponent) {
  return exponent >= 0 ? decimal(std::pow(10.0, exponent), 0) : decimal(std::pow(10.0, exponent), -exponent);
}

}  // namespace plot_detail

/// Draws both axes in powers of ten around the points, the roof, and each point with its label. Labels that
/// would lie on each other are moved apart.
inline Canvas draw_roofline(const Roofline& r) {
  using namespace plot_detail;
  constexpr int width = 1200, height = 800, left = 130, right = 1160, top = 110, bottom = 700;
  Canvas c(width, height);
  const double ridge = r.peak_gflops / r.read_gbs;
  double low_x = ridge / 2, high_x = ridge * 4, low_y = r.peak_gflops / 4;
  for (const RooflinePoint& p : r.points) {
    low_x = std::min(low_x, p.intensity), high_x = std::max(high_x, p.intensity);
    low_y = std::min(low_y, p.gflops);
  }
  const int x0 = static_cast<int>(std::floor(std::log10(low_x * 0.8))),
            x1 = static_cast<int>(std::ceil(std::log10(high_x * 1.2)));
  const int y0 = static_cast<int>(std::floor(std::log10(low_y * 0.9))),
            y1 = static_cast<int>(std::ceil(std::log10(r.peak_gflops * 1.2)));
  const auto at_x = [&](double v) { return left + (std::log10(v) - x0) / (x1 - x0) * (right - left); };
  const auto at_y = [&](double v) { return bottom - (std::log10(v) - y0) / (y1 - y0) * (bottom - top); };

  draw_text(c, left, 24, r.title, 3);
  draw_text(c, left, 62, shortened(r.below, right - left, 2), 2, kGrey);
  for (int e = x0; e <= x1; ++e) {
    const int x = static_cast<int>(at_x(std::pow(10.0, e)));
    fill_rect(c, x, top, 1, bottom - top, kRule);
    const std::string text = power_of_ten(e);
    draw_text(c, x - text_width(text, 2) / 2, bottom + 12, text, 2);
  }
  for (int e = y0; e <= y1; ++e) {
    const int y = static_cast<int>(at_y(std::pow(10.0, e)));
    fill_rect(c, left, y, right - left, 1, kRule);
    const std::string text = power_of_ten(e);
    draw_text(c, left - 12 - text_width(text, 2), y - 7, text, 2);
  }
  draw_text(c, (left + right) / 2 - text_width("operations per byte read", 2) / 2, bottom + 48,
            "operations per byte read", 2);
  draw_text(c, 20, top - 28, "GFLOP/s", 2);

  const double from = std::max(std::pow(10.0, x0), std::pow(10.0, y0) / r.read_gbs);
  line(c, at_x(from), at_y(from * r.read_gbs), at_x(ridge), at_y(r.peak_gflops), 3, kInk);
  line(c, at_x(ridge), at_y(r.peak_gflops), right, at_y(r.peak_gflops), 3, kInk);
  draw_text(c, right - text_width(r.peak_name, 2), static_cast<int>(at_y(r.peak_gflops)) - 24, r.peak_name,
            2);
  draw_text(c, left + 14, top + 14, "slope: " + r.read_name, 2);

  std::vector<RooflinePoint> points = r.points;
  std::sort(points.begin(), points.end(), [](const auto& a, const auto& b) { return a.gflops > b.gflops; });
  int last_y = 0;
  for (const RooflinePoint& p : points) {  // from the top down: a label may only sink
    const int x = static_cast<int>(at_x(p.intensity)), y = static_cast<int>(at_y(p.gflops));
    const int label_y = std::max(y - 7, last_y + 20);
    last_y = label_y;
    const bool to_left = x + 30 + text_width(p.label, 2) > right;
    const int label_x = to_left ? x - 24 - text_width(p.label, 2) : x + 24;
    line(c, x, y, to_left ? x - 18 : x + 18, label_y + 7, 1, kGrey);
    disc(c, x, y, 8, kWhite);
    disc(c, x, y, 6, request_color(p.color));
    draw_text(c, label_x, label_y, p.label, 2);
  }
  return c;
}

}  // namespace servelite
