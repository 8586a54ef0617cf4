// workload.hpp: who asks what, and when.
//
// The six-request scene of the main job, and a small text format for scenes of one's own:
//
//   # a comment
//   @pip = Your name is Pip. The secret word is lantern.      names a system prompt
//   0.000 | @pip | What is the secret word? | 16               arrival s | system | user | max tokens
//   0.005 | Be brief. | Count from 2 to 9.   | 64               a system prompt may stand in place
//   0.010 | | What is 2 plus 3?             | 16               or be left out
//
// Within a field, \n is a line break, \| a bar, \@ an @ and \\ a backslash; blanks around it do not count.
//
// Chapter: docs/10_side_by_side.md
#pragma once

#include <filesystem>
#include <fstream>
#include <locale>
#include <map>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "error.hpp"
#include "request.hpp"

namespace servelite {

/// Six users of one assistant, all within five milliseconds: two long stories, a long count, and three
/// answers of a few words. Nobody, the server included, knows beforehand which is which.
inline std::vector<Request> six_requests() {
  const std::string system =
      "Your name is Pip. You work at the harbour library. Children are always welcome here. "
      "The floor is made of old oak. A small bell hangs over the door. The secret word is lantern. "
      "Please be kind to every guest. The doors are open from 8 to 17. Many guests come from far away. "
      "There is tea in the kitchen. When it rains, the guests stay longer. "
      "End every answer with the word over. A large map shows the hills and the sea. "
      "Old friends often meet at the long table. Speak clearly and do not hurry. "
      "The chairs near the window are the best ones. Thank the guests when they leave.";
  std::vector<Request> requests;
  for (const char* user : {"Tell me a long story about a fox.", "What is the secret word?",
                           "Count from 1 to 60.", "Tell me a long story about an owl.",
                           "Reverse the list: boat, river, moon, king, lamp.", "Who are you?"}) {
    Request r;
    r.arrival = 0.001 * static_cast<double>(requests.size());
    r.system = system, r.user = user;
    r.max_tokens = 400;
    requests.push_back(r);
  }
  return requests;
}

namespace workload_detail {

inline std::string trim(std::string_view s) {
  const size_t first = s.find_first_not_of(" \t\r"), last = s.find_last_not_of(" \t\r");
  return first == std::string_view::npos ? "" : std::string(s.substr(first, last - first + 1));
}

/// Cuts a line at its bars; a backslash and what follows it stay as they are.
inline std::vector<std::string> fields_of(std::string_view line) {
  std::vector<std::string> fields(1);
  for (size_t i = 0; i < line.size(); ++i) {
    if (line[i] == '|') {
      fields.emplace_back();
      continue;
    }
    fields.back() += line[i];
    if (line[i] == '\\' && i + 1 < line.size()) fields.back() += line[++i];
  }
  for (std::string& field : fields) field = trim(field);
  return fields;
}

/// Resolves a field's backslashes.
inline std::string plain(std::string_view field, const std::string& where) {
  std::string text;
  for (size_t i = 0; i < field.size(); ++i) {
    if (field[i] != '\\') {
      text += field[i];
      continue;
    }
    const std::string_view next = field.substr(++i, 1);  // empty at the end
    if (next != "n" && next != "|" && next != "@" && next != "\\")
      fail(where, ": expected n, |, @ or \\ after a backslash, found '", next, "'");
    text += next == "n" ? "\n" : next;
  }
  return text;
}

template <class Number>
Number number_of(const std::string& text, Number low, Number high, const char* what,
                 const std::string& where) {
  Number value{};
  std::istringstream in(text);
  in.imbue(std::locale::classic());
  if (!(in >> value) || in.peek() != std::istringstream::traits_type::eof() ||
      !(value >= low && value <= high))
    fail(where, ": ", what, ": expected a number from ", low, " to ", high, ", found '", text, "'");
  return value;
}

}  // namespace workload_detail

/// Reads a workload; `name` is for the messages. Throws Error naming the line.
inline std::vector<Request> read_workload(std::istream& in, const std::string& name) {
  using namespace workload_detail;
  std::vector<Request> requests;
  std::map<std::string, std::string> systems;
  std::string line;
  for (int number = 1; std::getline(in, line); ++number) {
    if (number == 1 && line.rfind("\xEF\xBB\xBF", 0) == 0) line.erase(0, 3);  // some editors' UTF-8 mark
    const std::string where = name + ":" + std::to_string(number), text = trim(line);
    if (text.empty() || text[0] == '#') continue;
    const size_t equals = text.find('=');
    if (text[0] == '@' && equals < text.find('|')) {
      const std::string key = trim(text.substr(0, equals));
      const std::vector<std::string> f = fields_of(std::string_view(text).substr(equals + 1));
      if (f.size() != 1)
        fail(where, ": system prompt ", key, ": expected one text, found ", f.size(), " fields");
      if (!systems.emplace(key, plain(f[0], where)).second)
        fail(where, ": system prompt ", key, " is already defined");
      continue;
    }
    const std::vector<std::string> f = fields_of(text);
    if (f.size() != 4)
      fail(where, ": expected 4 fields 'arrival | system | user | max tokens', found ", f.size());
    Request r;
    r.arrival = number_of<double>(f[0], 0.0, 86400.0, "arrival", where);
    r.system = plain(f[1], where), r.user = plain(f[2], where);
    r.max_tokens = number_of<int>(plain(f[3], where), 1, 1 << 20, "max tokens", where);
    if (r.user.empty()) fail(where, ": user: expected some text, found none");
    if (f[1][0] == '@') {
      const auto known = systems.find(f[1]);
      if (known == systems.end()) fail(where, ": system prompt ", f[1], " is not defined above");
      r.system = known->second;
    }
    requests.push_back(std::move(r));
  }
  if (requests.empty()) fail(name, ": expected at least one request, found none");
  return requests;
}

/// "six" or the path of a workload file.
inline std::vector<Request> load_workload(const std::string& what) {
  if (what == "six") return six_requests();
  std::error_code unknown;
  if (std::filesystem::is_directory(what, unknown))
    fail("workload: expected a file, ", what, " is a directory");
  std::ifstream in(what);
  if (!in) fail("workload: expected \"six\" or a readable file, found '", what, "'");
  return read_workload(in, what);
}

}  // namespace servelite
