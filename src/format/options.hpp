// The options of all formats as bits: which of them a kind takes, how they are named, and where Format has
// them.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "ferry/format.hpp"

namespace ferry {

using OptionBits = std::uint32_t;
inline constexpr OptionBits kScaleColumns = 1, kPowerOfTwo = 2, kPackedScales = 4, kMxUp = 8, kMxOcp = 16,
                            kPerToken = 32, kScaleTiles = 64;
inline constexpr OptionBits kMxRules = kMxUp | kMxOcp, kScaleLayouts = kScaleColumns | kScaleTiles;

// The options that formats of the kind take.
OptionBits options_taken_by(FormatKind kind);
// The rule that a format of the kind has if none is given; 0 for a kind without rules.
OptionBits usual_rule(FormatKind kind);

// The options of a format, its rule among them.
OptionBits options_of(const Format& format);
// A format of the kind with options that it takes. Raw and registered formats have none.
Format format_with(FormatKind kind, OptionBits options);

// An option as it is written in a format's name, in the order of to_string().
struct OptionWord {
  OptionBits option;
  std::string_view word;
};
std::span<const OptionWord> option_words();

}  // namespace ferry
