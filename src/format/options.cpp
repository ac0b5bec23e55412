#include "format/options.hpp"

#include <iterator>

#include "format/encoding.hpp"

namespace ferry {
namespace {

// A row for each kind, in the order of the enumerators.
struct KindRow {
  const char* name;
  OptionBits options = 0;
  OptionBits usual_rule = 0;
};

constexpr KindRow kKinds[] = {{"bf16"},
                              {"fp16"},
                              {"fp32"},
                              {"fp8", kScaleColumns | kPowerOfTwo | kPackedScales},
                              {"raw"},
                              {"mxfp8", kMxRules | kScaleLayouts, kMxUp},
                              {"mxfp4", kMxRules | kScaleLayouts, kMxOcp},
                              {"nvfp4", kPerToken | kScaleLayouts},
                              {"registered"}};
static_assert(std::size(kKinds) == static_cast<std::size_t>(kLastFormatKind) + 1);

constexpr OptionWord kOptionWords[] = {
    {kMxUp, "-up"},          {kMxOcp, "-ocp"},       {kPerToken, "-token"},     {kScaleColumns, "-columns"},
    {kScaleTiles, "-tiles"}, {kPowerOfTwo, "-pow2"}, {kPackedScales, "-packed"}};

const KindRow& row_of(FormatKind kind) {
  return kKinds[static_cast<int>(kind)];
}

}  // namespace

const char* to_string(FormatKind kind) {
  return row_of(kind).name;
}

OptionBits options_taken_by(FormatKind kind) {
  return row_of(kind).options;
}

OptionBits usual_rule(FormatKind kind) {
  return row_of(kind).usual_rule;
}

std::span<const OptionWord> option_words() {
  return kOptionWords;
}

OptionBits options_of(const Format& format) {
  const auto if_set = [](bool set, OptionBits option) { return set ? option : 0; };
  switch (format.kind) {
    case FormatKind::fp8_e4m3:
      return if_set(format.fp8.column_major, kScaleColumns) | if_set(format.fp8.power_of_two, kPowerOfTwo) |
             if_set(format.fp8.packed, kPackedScales);
    case FormatKind::mxfp8:
    case FormatKind::mxfp4:
      return (format.mx.rule == MxRule::up ? kMxUp : kMxOcp) | if_set(format.mx.column_major, kScaleColumns) |
             if_set(format.mx.tiles, kScaleTiles);
    case FormatKind::nvfp4:
      return if_set(format.nvfp4_options.per_token, kPerToken) |
             if_set(format.nvfp4_options.column_major, kScaleColumns) |
             if_set(format.nvfp4_options.tiles, kScaleTiles);
    case FormatKind::bf16:
    case FormatKind::fp16:
    case FormatKind::fp32:
    case FormatKind::raw:
    case FormatKind::registered:
      break;
  }
  return 0;
}

Format format_with(FormatKind kind, OptionBits options) {
  const auto has = [options](OptionBits option) { return (options & option) != 0; };
  const OptionBits rule = has(kMxRules) ? options & kMxRules : usual_rule(kind);
  Format format{.kind = kind};
  switch (kind) {
    case FormatKind::fp8_e4m3:
      format.fp8 = {
          .column_major = has(kScaleColumns), .power_of_two = has(kPowerOfTwo), .packed = has(kPackedScales)};
      break;
    case FormatKind::mxfp8:
    case FormatKind::mxfp4:
      format.mx = {.rule = rule == kMxUp ? MxRule::up : MxRule::ocp,
                   .column_major = has(kScaleColumns),
                   .tiles = has(kScaleTiles)};
      break;
    case FormatKind::nvfp4:
      format.nvfp4_options = {
          .per_token = has(kPerToken), .column_major = has(kScaleColumns), .tiles = has(kScaleTiles)};
      break;
    case FormatKind::bf16:
    case FormatKind::fp16:
    case FormatKind::fp32:
    case FormatKind::raw:
    case FormatKind::registered:
      break;
  }
  return format;
}

}  // namespace ferry
