// corpus.hpp: the text that the tiny model is trained and examined on.
//
// What: conversations made of a system prompt and several questions with their answers. Every
//   question belongs to a family (count, spell, sort, ...). All families but the stories are
//   closed: the answer follows from the question and the system prompt, so it can be checked.
// Why: serving is about answers whose length nobody knows in advance (here one token to more than
//   200, each ended by itself), and about a shared system prompt whose loss must be visible. The
//   prompt states a name, a place, a secret word, opening hours and a house rule for all answers;
//   an engine that skips or mixes up the prefix answers wrongly.
// Rules of use:
//   - The same seed gives the same bytes on every machine: one generator of our own, no std
//     distribution, no floating point.
//   - Each turn has a key. About one key in eight is held out: make_conversation() never uses it,
//     make_eval() uses nothing else. The key is the question's exact text; for questions about the
//     system prompt it also names the stated value, for the house rule the rule's word. So a held
//     out sum, fact or opposite may have been seen in another phrasing, but never in this one.
//   - estimate_tokens() guesses. The trainer drops a conversation that turns out too long.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace servelite::corpus {

// ---- the generator and small helpers ----------------------------------------------------------

/// The finisher of splitmix64 (Steele, Lea, Flood, OOPSLA 2014): every input bit reaches every output bit.
inline std::uint64_t mix(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

struct Rng {
  std::uint64_t state = 0;
  std::uint64_t next() { return mix(state += 0x9E3779B97F4A7C15u); }
  /// A number in 0..n-1. The bias of the plain remainder is below 2^-50 here.
  int below(int n) { return static_cast<int>(next() % static_cast<std::uint64_t>(n)); }
  int between(int low, int high) { return low + below(high - low + 1); }
  bool chance(int percent) { return below(100) < percent; }
};

template <class List>
const auto& pick(Rng& rng, const List& items) {
  return items[static_cast<std::size_t>(rng.below(static_cast<int>(std::size(items))))];
}

template <class T>
void shuffle(Rng& rng, std::vector<T>& items) {
  for (std::size_t i = items.size(); i > 1; --i)
    std::swap(items[i - 1], items[static_cast<std::size_t>(rng.below(static_cast<int>(i)))]);
}

/// Replaces every '%' of a phrasing by the value.
inline std::string fill(std::string_view phrasing, std::string_view value) {
  std::string text;
  for (char c : phrasing) c == '%' ? text.append(value) : text.append(1, c);
  return text;
}

inline std::string join(const std::vector<std::string>& items, std::string_view between) {
  std::string text;
  for (std::size_t i = 0; i < items.size(); ++i) text.append(i ? between : "").append(items[i]);
  return text;
}

/// A guess at the token count: about three small letters to a token, while capitals, digits, signs
/// and the space before a digit are tokens of their own.
inline int estimate_tokens(std::string_view text) {
  int thirds = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    const char next = i + 1 < text.size() ? text[i + 1] : ' ';
    if (c == ' ')
      thirds += next >= '0' && next <= '9' ? 3 : 1;
    else
      thirds += c >= 'a' && c <= 'z' ? 1 : 3;
  }
  return (thirds + 2) / 3;
}

/// About one key in eight is never used in training (FNV-1a, then mixed, so that any bit will do).
/// The remainder was picked so that every entry of the tables stays trainable in some phrasing.
inline bool held_out(std::string_view key) {
  std::uint64_t hash = 0xCBF29CE484222325u;
  for (char c : key) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
  return mix(hash) % 8 == 2;
}

// ---- the tables -------------------------------------------------------------------------------
// Small and closed on purpose: every single word is seen in training, new are the combinations.

/// "a|b|c" as a list.
inline std::vector<std::string> split(std::string_view text) {
  std::vector<std::string> items(1);
  for (char c : text) {
    if (c == '|')
      items.emplace_back();
    else
      items.back().push_back(c);
  }
  return items;
}

struct Pair {
  std::string left, right;
};

/// "a=b|c=d" as a list of pairs.
inline std::vector<Pair> pairs(std::string_view text) {
  std::vector<Pair> list;
  for (const std::string& item : split(text)) {
    const std::size_t equals = item.find('=');
    list.push_back({item.substr(0, equals), item.substr(equals + 1)});
  }
  return list;
}

/// No two names share their first token, or which of them is meant would be hard to learn. So no name begins
/// with a letter that is rare in the texts: its first token would be a bare space. (Tried: with Pip and Petra
/// both in the list a model may answer Petra for either, and Jonas for Uma and Zoe.)
inline const std::vector<std::string> kNames =
    split("Pip|Mona|Otto|Lena|Bruno|Felix|Greta|Hugo|Iris|Nora|Rosa|Sam|Tilda|Wanda|Yuri|Ada|Clara|Dora");
/// A place is one word of each: 256 places, too many to learn by heart, so the answer has to be copied.
/// No two of the second words begin alike, which keeps them apart from their first token on.
inline const std::vector<std::string> kPlaceKinds =
    split("harbour|summer|mountain|city|rose|corner|royal|river|flower|book|north|tea|toy|ice|bird|fish");
inline const std::vector<std::string> kPlaceNouns = split(
    "bakery|cafe|dock|ferry|garden|hut|inn|kitchen|library|museum|nursery|office|park|school|theatre|yard");

/// The words of lists, spelling and repeating: 24 secret words, 16 animals, 56 other things.
inline const std::vector<std::string> kSecrets = split(
    "lantern|anchor|basket|candle|drum|feather|guitar|hammer|napkin|trumpet|kettle|ladder|mirror|needle|"
    "orange|pencil|ribbon|saddle|ticket|shovel|whistle|button|compass|magnet");
inline const std::vector<std::string> kAnimals =
    split("fox|owl|cat|dog|bear|hen|duck|frog|goat|horse|mouse|rabbit|sheep|wolf|crow|seal");
inline const std::vector<std::string> kThings = split(
    "apple|bell|boat|book|bread|bridge|cake|chair|cloud|coin|cup|door|egg|field|fish|flag|glass|hat|hill|"
    "home|ink|jam|key|king|lake|lamp|leaf|map|milk|moon|nest|net|oak|pen|plum|pond|queen|rain|ring|river|"
    "road|rope|salt|ship|shoe|snow|song|star|stone|sun|table|tree|wall|water|wheel|wind");

/// The words that open or close every answer under a house rule. None of the latter begins with a bare space,
/// as a further number would: whether to stop counting must be settled by one token.
inline const std::vector<std::string> kFirstWords = split(
    "Ahoy|Hello|Listen|Right|Sure|Well|Okay|Indeed|Aye|Welcome|Look|Yes|Great|Fine|Good|Hey|Bravo|"
    "Hurray|Thanks|Yay|Gladly|Truly|Super|Now");
inline const std::vector<std::string> kLastWords = split(
    "over|done|cheers|ciao|stop|roger|goodbye|maestro|friend|captain|sir|please|period|bingo|later|halt|"
    "peace|matey|always|today|thanks|indeed|forever|hooray");

inline const std::vector<Pair> kCapitals = pairs(
    "France=Paris|Italy=Rome|Spain=Madrid|Japan=Tokyo|Egypt=Cairo|Greece=Athens|Norway=Oslo|Peru=Lima|"
    "Cuba=Havana|Austria=Vienna|Portugal=Lisbon|Ireland=Dublin");
inline const std::vector<Pair> kColours = pairs(
    "grass=green|snow=white|coal=black|the sky=blue|a lemon=yellow|blood=red|chocolate=brown|ash=grey|"
    "a carrot=orange|a plum=purple");
inline const std::vector<Pair> kSounds =
    pairs("cow=moo|cat=meow|dog=woof|duck=quack|sheep=baa|pig=oink|lion=roar|owl=hoot|bee=buzz|snake=hiss");
inline const std::vector<Pair> kDays = pairs(
    "Monday=Tuesday|Tuesday=Wednesday|Wednesday=Thursday|Thursday=Friday|Friday=Saturday|Saturday=Sunday|"
    "Sunday=Monday");

/// Asked in both directions, so no word may stand twice.
inline const std::vector<Pair> kOpposites = pairs(
    "hot=cold|big=small|up=down|left=right|day=night|black=white|happy=sad|fast=slow|open=closed|"
    "full=empty|new=old|wet=dry|hard=soft|high=low|long=short|near=far|strong=weak|first=last|"
    "wide=narrow|loud=quiet|clean=dirty|good=bad|in=out|on=off|yes=no|win=lose|push=pull|buy=sell|"
    "start=finish|north=south|east=west|top=bottom");

/// Sentences of a system prompt that nobody ever asks about.
inline const std::vector<std::string> kFillers = split(
    "The floor is made of old oak.|Guests like to sit near the fire.|The roof was mended in spring.|"
    "There is tea in the kitchen.|Please be kind to every guest.|Speak clearly and do not hurry.|"
    "Children are always welcome here.|The garden behind the house is quiet.|"
    "Many guests come from far away.|In winter the windows are full of ice.|"
    "A small bell hangs over the door.|The walls are painted in pale green.|"
    "Some people only want to rest a little.|The path to the river is steep.|"
    "Nobody has to pay for a question.|The manager comes by once a week.|"
    "Old friends often meet at the long table.|It can be noisy at noon.|"
    "Lost things are kept in a wooden box.|The stairs are narrow and a bit dark.|"
    "Dogs may wait under the tree outside.|Be patient with people who are tired.|"
    "There are fresh flowers on every table.|The clock on the wall is a little late.|"
    "When it rains, the guests stay longer.|Do not talk about the weather too much.|"
    "The coats hang on the left side.|A large map shows the hills and the sea.|"
    "Most questions are short and simple.|Someone plays the piano in the evening.|"
    "The tables come from an old ship.|Keep the paths free of leaves and snow.|"
    "Sweet bread is baked on holidays.|The chairs near the window are the best ones.|"
    "If a guest is lost, show the way.|Never laugh at a wrong answer.|"
    "The lights are turned down late at night.|The cellar is cool and smells of apples.|"
    "A friendly cat lives in the attic.|Thank the guests when they leave.");

// ---- the persona: what a system prompt states ---------------------------------------------------

enum class Rule { none, first_word, last_word };

struct Persona {
  std::string name, place, secret;  // empty: not stated
  int opens = 0, closes = 0;        // full hours; 0: not stated
  Rule rule = Rule::none;
  std::string rule_word;  // of first_word and last_word
  std::string system;     // the prompt's text; empty: there is none, and nothing is stated
};

inline std::string rule_sentence(Rng& rng, const Persona& p) {
  static constexpr const char* first[] = {"Begin every answer with the word %.",
                                          "Start each answer with the word %."};
  static constexpr const char* last[] = {"End every answer with the word %.",
                                         "Close each answer with the word %."};
  if (p.rule == Rule::first_word) return fill(pick(rng, first), p.rule_word);
  return fill(pick(rng, last), p.rule_word);
}

/// The statements in random order among fillers, until the text has about `tokens` tokens.
inline std::string write_system(Rng& rng, const Persona& p, int tokens) {
  static constexpr const char* name[] = {"Your name is %.", "You are called %."};
  static constexpr const char* place[] = {"You work at the %.", "Your place of work is the %."};
  static constexpr const char* secret[] = {"The secret word is %.", "Remember the secret word %."};
  static constexpr const char* hours[] = {"The doors are open %.", "Guests may come %."};
  std::vector<std::string> sentences;
  if (!p.name.empty()) sentences.push_back(fill(pick(rng, name), p.name));
  if (!p.place.empty()) sentences.push_back(fill(pick(rng, place), p.place));
  if (!p.secret.empty()) sentences.push_back(fill(pick(rng, secret), p.secret));
  if (p.opens)
    sentences.push_back(
        fill(pick(rng, hours), "from " + std::to_string(p.opens) + " to " + std::to_string(p.closes)));
  if (p.rule != Rule::none) sentences.push_back(rule_sentence(rng, p));
  std::vector<std::string> fillers = kFillers;
  shuffle(rng, fillers);
  int written = estimate_tokens(join(sentences, " "));
  for (std::size_t i = 0; i < fillers.size() && written < tokens; ++i) {
    sentences.push_back(fillers[i]);
    written += estimate_tokens(" " + fillers[i]);
  }
  shuffle(rng, sentences);
  return join(sentences, " ");
}

/// How long conversations and system prompts are, in estimated tokens.
struct Options {
  int min_tokens = 200,
      max_tokens = 650;  // where a conversation stops taking new turns (a random point between)
  int limit = 930;       // no conversation is estimated longer than this
  int max_turns = 8;
  int no_system_percent = 15;
  int min_system = 100, max_system = 380;
};

inline Persona make_persona(Rng& rng, const Options& options = {}) {
  Persona p;
  p.name = pick(rng, kNames);
  p.place = pick(rng, kPlaceKinds);
  p.place += " " + pick(rng, kPlaceNouns);
  p.secret = pick(rng, kSecrets);
  p.opens = rng.between(5, 11);
  p.closes = rng.between(14, 22);
  if (rng.chance(15)) {  // one statement is missing, and then nobody asks for it
    const int which = rng.below(4);
    if (which == 0) p.name.clear();
    if (which == 1) p.place.clear();
    if (which == 2) p.secret.clear();
    if (which == 3) p.opens = p.closes = 0;
  }
  const int r = rng.below(100);
  p.rule = r < 40 ? Rule::none : r < 70 ? Rule::first_word : Rule::last_word;
  if (p.rule == Rule::first_word) p.rule_word = pick(rng, kFirstWords);
  if (p.rule == Rule::last_word) p.rule_word = pick(rng, kLastWords);
  // The smaller of two draws: most prompts are short, for long ones cost training time.
  const int a = rng.between(options.min_system, options.max_system),
            b = rng.between(options.min_system, options.max_system);
  p.system = write_system(rng, p, a < b ? a : b);
  return p;
}

inline std::string apply_rule(const Persona& p, const std::string& answer) {
  if (p.rule == Rule::first_word) return p.rule_word + "! " + answer;
  if (p.rule == Rule::last_word) return answer + " " + p.rule_word;
  return answer;
}

// ---- the families -------------------------------------------------------------------------------

struct Turn {
  std::string family;
  bool closed = true;
  std::string question, answer;
  std::string key;  // what must be held out
};

struct FamilyInfo {
  std::string name;
  bool closed;
  bool needs_system;  // asks about the system prompt
  int weight;         // how often it is drawn
};

inline const std::vector<FamilyInfo>& families() {
  static const std::vector<FamilyInfo> all = {
      {"count", true, false, 13},   {"repeat", true, false, 12},  {"spell", true, false, 8},
      {"reverse", true, false, 12}, {"sort", true, false, 10},    {"add", true, false, 14},
      {"fact", true, false, 9},     {"opposite", true, false, 8}, {"story", false, false, 5},
      {"name", true, true, 9},      {"secret", true, true, 8},    {"place", true, true, 9},
      {"hours", true, true, 13},    {"rule", true, true, 13}};
  return all;
}

struct Asked {
  std::string question, answer;
  std::string stated = "";  // what the answer rests on in the system prompt; part of the key
};

inline const std::string& any_word(Rng& rng) {
  const int i = rng.below(96);
  return pick(rng, i < 24 ? kSecrets : i < 40 ? kAnimals : kThings);
}

/// Many ranges, too many to learn by heart where each of them ends. Three phrasings: a range held out in
/// one of them is seen in another, or the model would learn that no count ends there.
inline Asked ask_count(Rng& rng) {
  static constexpr const char* how[] = {"Count from %.", "Count up from %."};
  const bool from_one = rng.chance(40);
  const int first = from_one ? 1 : rng.between(2, 40);
  const int last = from_one ? rng.between(2, 60) : first + rng.between(1, 20);
  std::vector<std::string> numbers;
  for (int i = first; i <= last; ++i) numbers.push_back(std::to_string(i));
  return {fill(pick(rng, how), numbers.front() + " to " + numbers.back()), join(numbers, " ")};
}

/// The running number is part of the answer: a small model can compare it with the question's,
/// while counting its own bare repetitions is much harder to learn.
inline Asked ask_repeat(Rng& rng) {
  static constexpr const char* how[] = {"Repeat % times, counting along.", "Write % times and count along."};
  const int n = rng.between(2, 12);
  const std::string word = any_word(rng);
  std::vector<std::string> words;
  for (int i = 1; i <= n; ++i) words.push_back(std::to_string(i) + " " + word);
  return {fill(pick(rng, how), word + " " + std::to_string(n)), join(words, " ")};
}

inline Asked ask_spell(Rng& rng) {
  static constexpr const char* how[] = {"Spell the word %.", "Spell %.", "How do you spell %?"};
  const std::string word = any_word(rng);
  std::vector<std::string> letters;
  for (char c : word) letters.push_back(std::string(1, c));
  return {fill(pick(rng, how), word), join(letters, "-")};
}

inline Asked ask_reverse(Rng& rng) {
  static constexpr const char* how[] = {"Reverse the list: %.", "Say the list backwards: %."};
  const std::size_t n = static_cast<std::size_t>(rng.between(2, 5));
  std::vector<std::string> words;
  while (words.size() < n) {  // distinct words: else "the item before it" has two meanings
    const std::string word = any_word(rng);
    bool known = false;
    for (const std::string& w : words) known = known || w == word;
    if (!known) words.push_back(word);
  }
  return {fill(pick(rng, how), join(words, ", ")), join({words.rbegin(), words.rend()}, ", ")};
}

inline Asked ask_sort(Rng& rng) {
  static constexpr const char* how[] = {"Sort the numbers %.", "Put in order: %."};
  std::vector<std::string> digits = {"1", "2", "3", "4", "5", "6", "7", "8", "9"};
  shuffle(rng, digits);
  digits.resize(static_cast<std::size_t>(rng.between(2, 5)));
  const std::set<std::string> sorted(digits.begin(), digits.end());
  return {fill(pick(rng, how), join(digits, ", ")), join({sorted.begin(), sorted.end()}, ", ")};
}

inline Asked ask_add(Rng& rng) {
  static constexpr const char* how[] = {"What is % plus ", "How much is % plus ", "Add % and "};
  const int a = rng.below(13), b = rng.below(13), form = rng.below(3);
  return {fill(how[form], std::to_string(a)) + std::to_string(b) + (form == 2 ? "." : "?"),
          std::to_string(a + b)};
}

inline Asked ask_fact(Rng& rng) {
  static constexpr const char* capital[] = {"What is the capital of %?", "Name the capital of %.",
                                            "Which city is the capital of %?"};
  static constexpr const char* colour[] = {"What colour is %?", "Name the colour of %.",
                                           "Which colour has %?"};
  static constexpr const char* sound[] = {"What sound does the % make?", "Name the sound of the %.",
                                          "How does the % sound?"};
  static constexpr const char* day[] = {"Which day comes after %?", "What day follows %?",
                                        "Name the day after %."};
  const auto ask = [&](const auto& table, const auto& how) -> Asked {
    const Pair& pair = pick(rng, table);
    return {fill(pick(rng, how), pair.left), pair.right};
  };
  const int i = rng.below(39);  // so that each of the 12 + 10 + 10 + 7 entries is equally likely
  return i < 12   ? ask(kCapitals, capital)
         : i < 22 ? ask(kColours, colour)
         : i < 32 ? ask(kSounds, sound)
                  : ask(kDays, day);
}

inline Asked ask_opposite(Rng& rng) {
  static constexpr const char* how[] = {"What is the opposite of %?", "Name the opposite of %.",
                                        "Say the opposite of %."};
  const Pair& pair = pick(rng, kOpposites);
  const bool swap = rng.chance(50);
  return {fill(pick(rng, how), swap ? pair.right : pair.left), swap ? pair.left : pair.right};
}

// ---- stories --------------------------------------------------------------------------------------
// A story follows a clock: three times of a day, or the seven days of a week. So the model always
// knows what comes next and when to end, where a loose chain of events would run in circles.

inline std::string with_article(const std::string& noun) {
  return (std::string_view("aeiou").find(noun[0]) != std::string_view::npos ? "an " : "a ") + noun;
}

/// What the hero may do at one time of the story; '%' is the friend met on the way.
inline const std::vector<std::string> kDeeds = split(
    "went down to the river and asked the fish, but the fish did not know.|"
    "climbed the high hill and looked far over the green fields.|"
    "met % on the road, and they shared some warm bread.|"
    "walked through the dark wood and was not afraid at all.|"
    "slept under an old oak tree until the rain was over.|helped % to carry a heavy basket home.|"
    "found a small blue boat and crossed the quiet lake.|"
    "sang a song for %, and both of them had to laugh.|"
    "saw a bright light behind the mill, but it was only the moon.|"
    "drank cold water from the well and rested on a warm stone.|"
    "looked under the bridge and found nothing but wet leaves.|"
    "asked % for help, and they looked behind every tree.|"
    "lost the way in the fog and waited for the sun to come back.|"
    "came to a little house, where a kind old woman gave out sweet plums.|"
    "followed a line of tiny steps in the snow to an empty nest.");

inline Asked ask_story(Rng& rng) {
  static constexpr const char* short_how[] = {"Tell me a short story about %.",
                                              "Make up a short story about %."};
  static constexpr const char* long_how[] = {"Tell me a long story about %.",
                                             "Make up a long story about %."};
  static constexpr const char* homes[] = {"near the river",  "at the edge of the wood", "behind the old mill",
                                          "on a green hill", "under a red roof",        "close to the sea"};
  static constexpr const char* moods[] = {"young", "clever", "brave", "lazy", "friendly", "shy"};
  static constexpr const char* found[] = {"under the bed",   "in the tall grass",
                                          "behind the door", "on the kitchen table",
                                          "in an old shoe",  "at the bottom of the well"};
  static constexpr const char* times[] = {"In the morning", "At noon", "In the evening"};
  const bool is_long = rng.chance(50);
  const std::string hero = pick(rng, kAnimals), thing = pick(rng, kSecrets);
  std::string friend_ = pick(rng, kAnimals);
  while (friend_ == hero) friend_ = pick(rng, kAnimals);
  std::vector<std::string> deeds = kDeeds;  // none twice
  shuffle(rng, deeds);

  // Each draw is its own statement: the order of evaluation around '+' is the compiler's choice.
  const std::string mood = pick(rng, moods), home = pick(rng, homes), place = pick(rng, found);
  std::string story = "Once there was " + with_article(mood + " " + hero) + " who lived " + home +
                      ". One day the " + hero + " lost " + with_article(thing) +
                      " and wanted to find it again.";
  bool met = false;  // from the second time on it is "the" friend
  for (std::size_t i = 0; i < (is_long ? 7u : 3u); ++i) {
    const bool meets = deeds[i].find('%') != std::string::npos;
    story +=
        std::string(" ") + (is_long ? std::string("On ") + kDays[i].left : times[i]) + " the " + hero + " ";
    story += fill(deeds[i], met ? "the " + friend_ : with_article(friend_));
    met = met || meets;
  }
  story += " At last the " + thing + " was found " + place + ", and the " + hero + " was happy.";
  return {fill(is_long ? pick(rng, long_how) : pick(rng, short_how), with_article(hero)), story};
}

// ---- turns ----------------------------------------------------------------------------------------

inline std::string make_key(std::string_view family, const Asked& asked) {
  return std::string(family) + "|" + asked.stated + "|" + asked.question;
}

/// Can this family be asked under this system prompt?
inline bool can_ask(std::string_view family, const Persona& p) {
  if (family == "name") return !p.name.empty();
  if (family == "secret") return !p.secret.empty();
  if (family == "place") return !p.place.empty();
  if (family == "hours") return p.opens != 0;
  if (family == "rule") return p.rule != Rule::none;
  return true;
}

/// A question about the system prompt. Names and secret words are few: held out with each other, not alone,
/// or the model would learn which of them a question is never answered with.
inline Asked ask_system(Rng& rng, std::string_view family, const Persona& p) {
  static constexpr const char* name[] = {"Who are you?", "What is your name?", "Tell me your name."};
  static constexpr const char* secret[] = {"What is the secret word?", "Tell me the secret word."};
  static constexpr const char* place[] = {"Where do you work?", "What is your place of work?"};
  static constexpr const char* hours[] = {"When are the doors open?", "When may guests come?"};
  const std::string span = std::to_string(p.opens) + " to " + std::to_string(p.closes);
  const std::string both = p.name + "|" + p.secret;
  if (family == "name") return {pick(rng, name), "I am " + p.name + ".", both};
  if (family == "secret") return {pick(rng, secret), p.secret, both};
  if (family == "place") return {pick(rng, place), "At the " + p.place + ".", p.place};
  if (family == "hours") return {pick(rng, hours), "From " + span + ".", span};
  throw std::invalid_argument("corpus: expected one of families(), found '" + std::string(family) + "'");
}

inline Asked ask(Rng& rng, std::string_view family, const Persona& p) {
  static constexpr const char* easy[] = {"add", "fact", "opposite"};
  if (family == "count") return ask_count(rng);
  if (family == "repeat") return ask_repeat(rng);
  if (family == "spell") return ask_spell(rng);
  if (family == "reverse") return ask_reverse(rng);
  if (family == "sort") return ask_sort(rng);
  if (family == "add") return ask_add(rng);
  if (family == "fact") return ask_fact(rng);
  if (family == "opposite") return ask_opposite(rng);
  if (family == "story") return ask_story(rng);
  if (family != "rule") return ask_system(rng, family, p);
  // The house rule: an easy question that the model knows. Only its meeting with this rule may be new.
  for (;;) {
    const char* inner = pick(rng, easy);
    Asked asked = ask(rng, inner, p);
    if (held_out(make_key(inner, asked))) continue;
    asked.stated = p.rule_word;
    return asked;
  }
}

inline Turn make_turn(Rng& rng, const std::string& family, const Persona& p) {
  const Asked asked = ask(rng, family, p);
  return {family, family != "story", asked.question, apply_rule(p, asked.answer), make_key(family, asked)};
}

// ---- training -------------------------------------------------------------------------------------

struct Conversation {
  std::string system;
  std::vector<Turn> turns;
};

/// A family by weight, among those that this persona allows. Under a house rule add, fact and
/// opposite are asked as "rule", so that their held-out meetings with the rule word stay unseen.
inline std::string draw_family(Rng& rng, const Persona& p) {
  int sum = 0;
  for (const FamilyInfo& f : families()) sum += f.weight;
  for (;;) {
    int r = rng.below(sum);
    std::size_t i = 0;
    while (r >= families()[i].weight) r -= families()[i++].weight;
    const std::string& name = families()[i].name;
    const bool easy = name == "add" || name == "fact" || name == "opposite";
    if (easy && p.rule != Rule::none) return "rule";
    if (can_ask(name, p)) return name;
  }
}

inline Conversation make_conversation(Rng& rng, const Options& options = {}) {
  constexpr int markers = 5;  // a turn's role and end markers and its first spaces
  const Persona p = rng.chance(options.no_system_percent) ? Persona{} : make_persona(rng, options);
  Conversation c{p.system, {}};
  const int enough = rng.between(options.min_tokens, options.max_tokens);
  int tokens = estimate_tokens(p.system) + markers;
  std::set<std::string> asked;  // nobody asks the same thing twice
  for (int tries = 0; tries < 100; ++tries) {
    if (static_cast<int>(c.turns.size()) == options.max_turns || (tokens >= enough && !c.turns.empty()))
      break;
    Turn turn = make_turn(rng, draw_family(rng, p), p);
    const int more = estimate_tokens(turn.question) + estimate_tokens(turn.answer) + markers;
    if (held_out(turn.key) || tokens + more > options.limit || !asked.insert(turn.key).second) continue;
    tokens += more;
    c.turns.push_back(std::move(turn));
  }
  return c;
}

// ---- examination ----------------------------------------------------------------------------------

struct EvalItem {
  std::string family;
  bool closed;
  std::string system, question, answer;
};

/// n held-out questions, each the first turn after its own system prompt (or after none), no two alike.
inline std::vector<EvalItem> make_eval(Rng& rng, const std::string& family, int n) {
  std::vector<EvalItem> items;
  std::set<std::string> known;
  while (static_cast<int>(items.size()) < n) {
    Persona p;
    if (!rng.chance(Options{}.no_system_percent)) p = make_persona(rng);
    if (!can_ask(family, p)) continue;
    Turn turn;
    do turn = make_turn(rng, family, p);
    while (!held_out(turn.key) && rng.below(64));  // gives up now and then: a rule word may have no such key
    if (!held_out(turn.key) || !known.insert(p.system + "\n" + turn.question).second) continue;
    items.push_back({family, turn.closed, p.system, turn.question, turn.answer});
  }
  return items;
}

}  // namespace servelite::corpus
