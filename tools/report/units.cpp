#include "tools/report/units.hpp"

#include <fmt/color.h>
#include <fmt/format.h>

#include <array>
#include <cmath>
#include <span>

namespace ferry::report {
namespace {

struct Unit {
  double size;
  const char* name;
};

// Three digits, or all digits before the decimal point if there are more.
std::string three_digits(double value) {
  const double size = std::fabs(value);
  const int decimals = size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2;
  return fmt::format("{:.{}f}", value, decimals);
}

// In the largest unit that the rounded value reaches.
std::string scaled(double value, std::span<const Unit> units) {
  const Unit* chosen = &units.front();
  for (const Unit& unit : units) {
    if (std::fabs(value) >= 0.9995 * unit.size) chosen = &unit;
  }
  return three_digits(value / chosen->size) + " " + chosen->name;
}

constexpr std::array kTimes{Unit{1, "us"}, Unit{1e3, "ms"}, Unit{1e6, "s"}};
constexpr std::array kBytes{Unit{1, "B"}, Unit{1e3, "kB"}, Unit{1e6, "MB"}, Unit{1e9, "GB"},
                            Unit{1e12, "TB"}};

}  // namespace

std::string with_thousands(std::int64_t value) {
  const std::string digits = std::to_string(value);
  std::string text;
  for (std::size_t i = 0; i < digits.size(); ++i) {
    const bool after_digit = i > 0 && digits[i - 1] != '-';
    if (after_digit && (digits.size() - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return text;
}

std::string counted(std::int64_t number, const char* one) {
  return with_thousands(number) + " " + one + (number == 1 ? "" : "s");
}

std::string in_mean(double mean) {
  return mean < 999.5 ? three_digits(mean) : with_thousands(std::llround(mean));
}

std::string in_time(double us) {
  return scaled(us, kTimes);
}

std::string in_bytes(double bytes) {
  if (std::fabs(bytes) < 1000) return fmt::format("{:.0f} B", bytes);
  return scaled(bytes, kBytes);
}

std::string in_bytes_per_second(double per_second) {
  return in_bytes(per_second) + "/s";
}

std::string in_percent(double share) {
  return fmt::format("{:.1f} %", share * 100);
}

std::string in_times(double ratio) {
  return fmt::format("{:.2f} x", ratio);
}

std::string toned(const std::string& text, Tone tone, bool coloured) {
  if (!coloured) return text;
  using Colour = fmt::terminal_color;
  if (tone == Tone::bad) return fmt::format(fg(Colour::red) | fmt::emphasis::bold, "{}", text);
  return fmt::format(fg(tone == Tone::good ? Colour::green : Colour::yellow), "{}", text);
}

}  // namespace ferry::report
