// plot.hpp: the picture of the main job, a PNG timeline of several runs on one time axis.
//
//   name      arrivals  ' ''
//   numbers   seat 0    [prefill]= decode = = = = ///dead/// v      v: the first token is out
//             seat 1    [prefill\\padding]= = = = = = = = = v
//             KV        used (area), reserved (line), capacity (top edge)
//                       |----|----|----|----|  ms
//
// A run can have more steps than the picture has pixels. So every seat and pixel column shows the one
// span that covers most of the column's time: nothing short vanishes beside an empty gap, and nothing is
// drawn twice.
//
// Outer circle. Chapter: docs/10_side_by_side.md
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <map>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "canvas.hpp"
#include "metrics.hpp"

namespace servelite {

namespace plot_detail {

/// Seconds as milliseconds, with as many digits as matter.
inline std::string milliseconds(double seconds) {
  if (std::isnan(seconds)) return "-";
  const double ms = seconds * 1e3;
  return decimal(ms, ms < 9.995 ? 2 : ms < 99.95 ? 1 : 0) + " ms";
}

// ---- layout: where everything is --------------------------------------------------------------------

struct StripLayout {
  int top;             ///< the lane of arrivals
  int rows_top, rows;  ///< seat rows: those in use, at most 256
  int kv_top, bottom;
};

struct TimelineLayout {
  static constexpr int width = 1600, left = 384, right = 1572, lane = 24, kv_height = 72;
  int height = 0, legend_lines = 0, row_height = 0, axis_y = 0;
  double seconds = 0;  ///< the common time axis: 0 at `left`, this at `right`
  std::vector<StripLayout> strips;

  int x_of(double t) const { return left + static_cast<int>(std::lround(t / seconds * (right - left))); }
  int row_y(size_t strip, int seat) const { return strips[strip].rows_top + seat * row_height; }
};

inline TimelineLayout timeline_layout(const std::vector<RunReport>& runs) {
  TimelineLayout l;
  size_t requests = 0;
  int rows_of_all = 0;
  std::vector<int> rows;
  for (const RunReport& run : runs) {
    int used = 1;
    for (const StepRecord& step : run.steps) {
      l.seconds = std::max(l.seconds, step.end);
      for (const SpanRecord& span : step.spans) used = std::max(used, span.seat + 1);
    }
    for (const RequestRecord& r : run.requests) {
      l.seconds = std::max(l.seconds, r.arrival);
      if (!r.out_at.empty()) l.seconds = std::max(l.seconds, r.out_at.back());
    }
    requests = std::max(requests, run.requests.size());
    rows.push_back(std::min(used, 256));
    rows_of_all += rows.back();
  }
  if (l.seconds <= 0) l.seconds = 0.001;
  l.seconds *= 1.01;  // so that the last mark is not on the edge
  l.legend_lines = static_cast<int>(std::min<size_t>((requests + 2) / 3, 4));
  l.row_height = std::clamp(480 / std::max(rows_of_all, 1), 4, 34);
  int y = 64 + 28 + 24 * l.legend_lines + 24;
  for (const int n : rows) {
    StripLayout s{y, y + TimelineLayout::lane, n, 0, 0};
    s.kv_top = std::max(s.rows_top + n * l.row_height + 12, y + 166 - TimelineLayout::kv_height);
    s.bottom = s.kv_top + TimelineLayout::kv_height;
    l.strips.push_back(s);
    y = s.bottom + 30;
  }
  l.axis_y = y - 18;
  l.height = l.axis_y + 66;
  return l;
}

// ---- the strips -------------------------------------------------------------------------------------

enum class Mark { prefill, decode, padding, dead };

/// What one pixel column of one seat shows. request -1: nothing.
struct Cell {
  int request = -1;
  Mark mark = Mark::decode;
  bool operator==(const Cell&) const = default;
};

/// For every shown seat and pixel column the span that covers most of it: [rows][right - left].
inline std::vector<std::vector<Cell>> seat_cells(const RunReport& run, const TimelineLayout& l, int rows) {
  constexpr int columns = TimelineLayout::right - TimelineLayout::left;
  const double per_second = columns / l.seconds;
  std::vector<std::map<std::tuple<int, int, Mark>, double>> cover(static_cast<size_t>(rows));
  const auto add = [&](const SpanRecord& span, Mark mark, double begin, double end) {
    for (int x = static_cast<int>(begin * per_second); x < columns && x <= end * per_second; ++x)
      cover[static_cast<size_t>(span.seat)][{x, span.request, mark}] +=
          std::min(x + 1.0, end * per_second) - std::max(x + 0.0, begin * per_second);
  };
  for (const StepRecord& step : run.steps)
    for (const SpanRecord& span : step.spans) {
      if (span.seat < 0 || span.seat >= rows) continue;
      const double worth = span.dead ? 0 : 1 - static_cast<double>(span.padding) / std::max(span.rows, 1);
      const double middle = step.begin + (step.end - step.begin) * worth;  // the padding: its share, last
      const Mark mark = span.phase == Phase::prefill ? Mark::prefill : Mark::decode;
      if (worth > 0) add(span, mark, step.begin, middle);
      if (worth < 1) add(span, span.dead ? Mark::dead : Mark::padding, middle, step.end);
    }

  std::vector<std::vector<Cell>> cells(static_cast<size_t>(rows), std::vector<Cell>(columns));
  for (size_t seat = 0; seat < cells.size(); ++seat) {
    std::vector<double> most(columns, 0.0);
    for (const auto& [key, time] : cover[seat]) {
      const auto [x, request, mark] = key;
      if (time <= most[static_cast<size_t>(x)]) continue;
      most[static_cast<size_t>(x)] = time;
      cells[seat][static_cast<size_t>(x)] = {request, mark};
    }
  }
  return cells;
}

inline void draw_mark(Canvas& c, int x, int y, int w, int h, const Cell& cell) {
  const Color color = request_color(cell.request);
  const int inset = h / 5;
  switch (cell.mark) {
    case Mark::prefill:
      fill_rect(c, x, y, w, h, mix(color, Color{0, 0, 0}, 0.45));
      fill_rect(c, x + (w > 4 ? 2 : 0), y + h / 10, w - (w > 4 ? 4 : 0), h - h / 10 * 2, color);
      break;
    case Mark::decode: fill_rect(c, x, y + inset, w, h - 2 * inset, mix(color, kWhite, 0.3)); break;
    case Mark::padding: hatch(c, x, y, w, h, -1, 5, kWhite); break;
    case Mark::dead: hatch(c, x, y + inset, w, h - 2 * inset, 1, 8, kRule); break;
  }
}

inline void draw_seats(Canvas& c, const RunReport& run, const TimelineLayout& l, size_t strip) {
  const int h = l.row_height - (l.row_height > 10 ? 4 : 1);
  const auto cells = seat_cells(run, l, l.strips[strip].rows);
  for (size_t seat = 0; seat < cells.size(); ++seat) {
    const int y = l.row_y(strip, static_cast<int>(seat));
    int named = -1;  // the request whose number was written last
    for (size_t x = 0, end; x < cells[seat].size(); x = end) {
      const Cell& cell = cells[seat][x];
      for (end = x + 1; end < cells[seat].size() && cells[seat][end] == cell;) ++end;
      if (cell.request < 0) continue;
      const int left = l.left + static_cast<int>(x), w = static_cast<int>(end - x);
      draw_mark(c, left, y, w, h, cell);
      const std::string number = std::to_string(cell.request);
      if (cell.mark != Mark::decode || named == cell.request || h < 26 || w < text_width(number, 2) + 12)
        continue;
      draw_text(c, left + 8, y + (h - 14) / 2, number, 2);
      named = cell.request;
    }
  }
}

/// Ticks where requests arrive; triangles, in the seat's row, where their first token is out.
inline void draw_events(Canvas& c, const RunReport& run, const TimelineLayout& l, size_t strip) {
  const StripLayout& s = l.strips[strip];
  std::map<int, int> seat_of;
  for (const StepRecord& step : run.steps)
    for (const SpanRecord& span : step.spans)
      if (!span.dead) seat_of.emplace(span.request, span.seat);
  for (const RequestRecord& r : run.requests) {
    fill_rect(c, l.x_of(r.arrival), s.top, 3, l.lane - 12, mix(request_color(r.index), Color{0, 0, 0}, 0.2));
    const auto seat = seat_of.find(r.index);
    if (r.out_at.empty() || seat == seat_of.end() || seat->second < 0 || seat->second >= s.rows) continue;
    const int size = std::clamp(l.row_height / 2, 6, 14);
    triangle(c, l.x_of(r.out_at.front()), l.row_y(strip, seat->second) + size, size);
  }
}

/// Per pixel column the most KV in use and reserved. A step's state holds until the next step begins.
inline void draw_kv(Canvas& c, const RunReport& run, const TimelineLayout& l, size_t strip) {
  const int top = l.strips[strip].kv_top, bottom = l.strips[strip].bottom;
  const double capacity = std::max(run.kv_capacity_tokens, 1);
  fill_rect(c, l.left, top, l.right - l.left, bottom - top, kPaper);
  fill_rect(c, l.left, top - 1, l.right - l.left, 1, kGrey);
  std::vector<int> used(static_cast<size_t>(l.right - l.left), 0), reserved = used;
  for (size_t i = 0; i < run.steps.size(); ++i) {
    const int from = l.x_of(run.steps[i].begin) - l.left;
    const int to = l.x_of(i + 1 < run.steps.size() ? run.steps[i + 1].begin : run.steps[i].end) - l.left;
    for (int x = std::max(from, 0); x <= to && x < l.right - l.left; ++x) {
      int &u = used[static_cast<size_t>(x)], &r = reserved[static_cast<size_t>(x)];
      u = std::max(u, run.steps[i].kv.used), r = std::max(r, run.steps[i].kv.reserved);
    }
  }
  const auto height = [&](int tokens) {
    return static_cast<int>(std::lround(std::min(tokens / capacity, 1.0) * (bottom - top)));
  };
  for (int x = 0, before = 0; x < l.right - l.left; ++x) {
    const int u = height(used[static_cast<size_t>(x)]), r = height(reserved[static_cast<size_t>(x)]);
    fill_rect(c, l.left + x, bottom - u, 1, u, kKvUsed);
    if (r > 0 || before > 0)
      fill_rect(c, l.left + x, bottom - std::max(r, before) - 1, 1, std::abs(r - before) + 2, kInk);
    before = r;
  }
}

/// The name and the numbers that matter, left of the strip.
inline void draw_numbers(Canvas& c, const RunReport& run, const TimelineLayout& l, size_t strip) {
  const Summary s = summarize(run);
  const StripLayout& at = l.strips[strip];
  draw_text(c, 24, at.top, shortened(run.name, 230, 3), 3);
  const int64_t rows = s.rows_useful + s.rows_padding + s.rows_dead + s.rows_recomputed;
  const double useful = rows ? 100.0 * static_cast<double>(s.rows_useful) / static_cast<double>(rows) : 0;
  const std::pair<const char*, std::string> lines[] = {
      {"makespan", milliseconds(s.makespan)}, {"tokens/s", decimal(s.output_tok_s, 0)},
      {"TTFT p50", milliseconds(s.ttft.p50)}, {"TTFT p95", milliseconds(s.ttft.p95)},
      {"E2E p50", milliseconds(s.e2e.p50)},   {"useful rows", decimal(useful, 1) + " %"}};
  int y = at.top + 34;
  for (const auto& [label, value] : lines) {
    draw_text(c, 24, y, label, 2, kGrey);
    draw_text(c, 154, y, value, 2);
    y += 21;
  }
}

/// What the rows and the KV panel are, at the left edge of the axis.
inline void draw_row_names(Canvas& c, const RunReport& run, const TimelineLayout& l, size_t strip) {
  const StripLayout& s = l.strips[strip];
  const auto name = [&](int y, const std::string& text) {
    draw_text(c, l.left - 10 - text_width(text, 2), y, text, 2, kGrey);
  };
  const int every = std::max(1, 18 / l.row_height + (18 % l.row_height != 0));  // letters need 18 pixels
  for (int seat = 0; seat < s.rows; seat += every) {
    const int y = l.row_y(strip, seat) + std::max(0, (l.row_height - 18) / 2);
    if (y + 18 <= s.kv_top - 4) name(y, "seat " + std::to_string(seat));  // else it would meet the KV's name
  }
  name(s.kv_top - 4, std::to_string(run.kv_capacity_tokens));
  name(s.kv_top + 17, "KV"), name(s.kv_top + 35, "tokens");
  name(s.bottom - 14, "0");
}

inline void draw_strip(Canvas& c, const RunReport& run, const TimelineLayout& l, size_t strip) {
  const StripLayout& s = l.strips[strip];
  const int bar = l.row_height - (l.row_height > 10 ? 4 : 1);
  for (int seat = 0; seat < s.rows; ++seat)
    fill_rect(c, l.left, l.row_y(strip, seat), l.right - l.left, bar, kPaper);
  draw_numbers(c, run, l, strip);
  draw_row_names(c, run, l, strip);
  draw_kv(c, run, l, strip);
  draw_seats(c, run, l, strip);
  double done = 0;
  for (const RequestRecord& r : run.requests)
    if (!r.out_at.empty()) done = std::max(done, r.out_at.back());
  if (done > 0) {
    const std::string text = "done at " + milliseconds(done);
    const int x = l.x_of(done), w = text_width(text, 2);
    fill_rect(c, x, s.top, 2, s.bottom - s.top, kInk);
    draw_text(c, x + 8 + w <= l.right ? x + 8 : x - 8 - w, s.top, text, 2);
  }
  draw_events(c, run, l, strip);
}

// ---- axis, legend, the whole ------------------------------------------------------------------------

/// Grid lines and times at 1, 2 or 5 times a power of ten; in ms, from 10 s on in s.
inline void draw_axis(Canvas& c, const TimelineLayout& l) {
  const bool in_ms = l.seconds < 10;
  const double unit = in_ms ? 1e-3 : 1, least = l.seconds / unit / 12;
  const double power = std::pow(10.0, std::floor(std::log10(least)));
  const double tick = power * (least <= power ? 1 : least <= 2 * power ? 2 : least <= 5 * power ? 5 : 10);
  const int digits = tick < 1 ? static_cast<int>(std::ceil(-std::log10(tick) - 1e-9)) : 0;
  for (int i = 0; i * tick * unit <= l.seconds; ++i) {
    const int x = l.x_of(i * tick * unit);
    const std::string text = decimal(i * tick, digits);
    if (!l.strips.empty()) fill_rect(c, x, l.strips[0].top, 1, l.axis_y - l.strips[0].top, kRule);
    fill_rect(c, x, l.axis_y, 1, 6, kInk);
    draw_text(c, x - text_width(text, 2) / 2, l.axis_y + 10, text, 2);
  }
  fill_rect(c, l.left, l.axis_y, l.right - l.left, 1, kInk);
  const std::string name =
      std::string("time since the start of the run, in ") + (in_ms ? "milliseconds" : "seconds");
  draw_text(c, (l.left + l.right - text_width(name, 2)) / 2, l.axis_y + 36, name, 2);
}

/// What the marks mean, then the requests: number, colour, question.
inline void draw_legend(Canvas& c, const std::vector<RunReport>& runs) {
  int x = 24, y = 62;
  const auto entry = [&](const char* text, const auto& draw) {
    draw();
    draw_text(c, x + 38, y + 1, text, 2);
    x += 38 + text_width(text, 2) + 30;
  };
  const auto mark = [&](Mark m) { return [&, m] { draw_mark(c, x, y - 2, 30, 20, {7, m}); }; };
  entry("prefill", mark(Mark::prefill));
  entry("decode", mark(Mark::decode));
  entry("padding", mark(Mark::padding));
  entry("dead seat", mark(Mark::dead));
  entry("first token out", [&] { triangle(c, x + 15, y + 15, 14); });
  entry("arrival", [&] { fill_rect(c, x + 14, y, 3, 12, kInk); });
  entry("KV used", [&] { fill_rect(c, x, y - 2, 30, 20, kKvUsed); });
  entry("KV reserved", [&] { fill_rect(c, x, y + 6, 30, 2, kInk); });

  const RunReport* longest = nullptr;
  for (const RunReport& run : runs)
    if (!longest || run.requests.size() > longest->requests.size()) longest = &run;
  if (!longest) return;
  const size_t count = longest->requests.size(), shown = count > 12 ? 11 : count;
  for (size_t i = 0; i < std::min<size_t>(count, 12); ++i) {
    const RequestRecord& r = longest->requests[i];
    x = 24 + static_cast<int>(i % 3) * 518, y = 62 + 28 + 24 * static_cast<int>(i / 3);
    if (i == shown) {
      draw_text(c, x, y, "and " + std::to_string(count - shown) + " more", 2);
      break;
    }
    fill_rect(c, x, y - 2, 30, 18, request_color(r.index));
    draw_text(c, x + 38, y, shortened(std::to_string(r.index) + ": " + r.user, 518 - 54, 2), 2);
  }
}

}  // namespace plot_detail

/// The picture: one strip per run, in order.
inline Canvas draw_timeline(const std::vector<RunReport>& runs, const std::string& title) {
  using namespace plot_detail;
  const TimelineLayout l = timeline_layout(runs);
  Canvas c(l.width, l.height);
  draw_text(c, 24, 18, shortened(title, l.width - 48, 3), 3);
  draw_legend(c, runs);
  draw_axis(c, l);
  for (size_t i = 0; i < runs.size(); ++i) draw_strip(c, runs[i], l, i);
  return c;
}

/// Writes the picture. Error if the file cannot be written.
inline void plot_timeline(const std::string& path, const std::vector<RunReport>& runs,
                          const std::string& title) {
  write_png(path, draw_timeline(runs, title));
}

}  // namespace servelite
