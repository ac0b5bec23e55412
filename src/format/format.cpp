#include "ferry/format.hpp"

#include <algorithm>
#include <charconv>
#include <iterator>
#include <string_view>
#include <utility>
#include <vector>

#include "base/nearest.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"
#include "format/blocks.hpp"
#include "format/encoding.hpp"
#include "format/parts.hpp"
#include "format/registry.hpp"

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

namespace {

constexpr std::string_view kRawPrefix = "raw:";

// Names that NumPy and PyTorch have for what formats are made of.
constexpr std::pair<std::string_view, FormatKind> kTypeNames[] = {
    {"bfloat16", FormatKind::bf16}, {"float16", FormatKind::fp16}, {"half", FormatKind::fp16},
    {"float32", FormatKind::fp32},  {"float", FormatKind::fp32},   {"float8_e4m3fn", FormatKind::fp8_e4m3}};

// The format that an unknown name may stand for.
std::string meant_by(std::string_view name) {
  std::vector<std::string> known;
  for (const auto& [type, kind] : kTypeNames)
    if (name == type) return str(" (did you mean ", to_string(kind), "?)");
  for (const KindRow& row : kKinds) known.emplace_back(row.name);
  return did_you_mean(name, known);
}

[[noreturn]] void refuse(std::string_view name, std::string_view reason) {
  throw UsageError(str("format '", name, "': ", reason,
                       "; known: bf16, fp16, fp32, fp8[-columns][-pow2[-packed]], mxfp8 and mxfp4[-up|-ocp]"
                       "[-columns|-tiles], nvfp4[-token][-columns|-tiles], raw:<bytes>[+<bytes>]..., and "
                       "formats that the program has registered"));
}

std::int64_t parse_bytes(std::string_view name, std::string_view digits) {
  std::int64_t bytes = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), bytes);
  if (error != std::errc{} || end != digits.data() + digits.size()) {
    refuse(name, str("'", digits, "' is not a number of bytes"));
  }
  return bytes;
}

Format parse_raw(std::string_view name) {
  Format format{.kind = FormatKind::raw};
  std::string_view rest = name.substr(kRawPrefix.size());
  for (int part = 0; part < kMaxParts; ++part) {
    const std::size_t plus = std::min(rest.find('+'), rest.size());
    format.part_bytes[part] = parse_bytes(name, rest.substr(0, plus));
    if (format.part_bytes[part] == 0) refuse(name, "a part has 0 bytes");
    if (plus == rest.size()) {
      check_format(format, 0, DType::bf16);
      return format;
    }
    rest.remove_prefix(plus + 1);
  }
  refuse(name, str("more than ", kMaxParts, " parts"));
}

// Reads the options after the name of the kind.
Format parse_options(std::string_view name, FormatKind kind) {
  const std::string_view base = to_string(kind);
  OptionBits given = 0;
  std::string_view rest = name.substr(base.size());
  while (!rest.empty()) {
    const std::size_t end = std::min(rest.find('-', 1), rest.size());
    const std::string_view word = rest.substr(0, end);
    const auto words = option_words();
    const auto option =
        std::find_if(words.begin(), words.end(), [&](const auto& o) { return o.word == word; });
    if (option == words.end() || (options_taken_by(kind) & option->option) == 0)
      refuse(name, str("'", word, "' is not an option of ", base));
    if ((given & option->option) != 0) refuse(name, str("'", word, "' is given twice"));
    given |= option->option;
    rest.remove_prefix(end);
  }
  const auto has_all = [given](OptionBits options) { return (given & options) == options; };
  if (has_all(kPackedScales) && !has_all(kPowerOfTwo)) refuse(name, "packed scales need -pow2");
  if (has_all(kMxRules)) refuse(name, "-up and -ocp exclude each other");
  if (has_all(kScaleLayouts)) refuse(name, "-columns and -tiles exclude each other");
  return format_with(kind, given);
}

// Whether `name` is that of the kind, with options if it takes any.
bool names(std::string_view name, FormatKind kind) {
  const std::string_view base = to_string(kind);
  return name == base || (options_taken_by(kind) != 0 && name.starts_with(str(base, "-")));
}

}  // namespace

Format Format::raw(std::initializer_list<std::int64_t> bytes) {
  if (bytes.size() > static_cast<std::size_t>(kMaxParts)) {
    throw UsageError(str("format raw: ", bytes.size(), " parts, must be 1 to ", kMaxParts));
  }
  Format format{.kind = FormatKind::raw};
  std::copy(bytes.begin(), bytes.end(), format.part_bytes.begin());
  check_format(format, 0, DType::bf16);
  return format;
}

std::string to_string(const Format& format) {
  const Encoding encoding = encoding_of(format);
  if (encoding.by_caller) return name_of_registered(format);
  if (!format.is_raw()) {
    std::string name = to_string(format.kind);
    const OptionBits written = options_of(format) & ~usual_rule(format.kind);
    for (const OptionWord& each : option_words())
      if ((written & each.option) != 0) name += each.word;
    return name;
  }
  std::string name(kRawPrefix);
  for (int part = 0; part < kMaxParts && format.part_bytes[part] != 0; ++part) {
    name += str(part == 0 ? "" : "+", format.part_bytes[part]);
  }
  return name;
}

Format parse_format(const std::string& name) {
  for (int kind = 0; kind <= static_cast<int>(kLastFormatKind); ++kind) {
    const Encoding encoding = encoding_of({.kind = static_cast<FormatKind>(kind)});
    const bool is_named = encoding.element != ElementType::bytes;
    if (is_named && names(name, static_cast<FormatKind>(kind)))
      return parse_options(name, static_cast<FormatKind>(kind));
  }
  if (name.starts_with(kRawPrefix)) return parse_raw(name);
  if (const std::optional<Format> registered = find_registered(name)) return *registered;
  refuse(name, str("unknown", meant_by(name)));
}

namespace {

Encoding mx_encoding(const MxOptions& options, ElementType element) {
  return {.element = element,
          .rule = options.rule == MxRule::up ? ScaleRule::mx_up : ScaleRule::mx_ocp,
          .scale_type = ScaleType::exponent,
          .scale_columns = options.column_major,
          .scale_tiles = options.tiles,
          .block = kMxBlock};
}

}  // namespace

Encoding encoding_of(const Format& format) {
  switch (format.kind) {
    case FormatKind::bf16:
      return {.element = ElementType::bf16};
    case FormatKind::fp16:
      return {.element = ElementType::fp16};
    case FormatKind::fp32:
      return {.element = ElementType::fp32};
    case FormatKind::fp8_e4m3:
      return {.element = ElementType::e4m3,
              .rule = format.fp8.power_of_two ? ScaleRule::power_of_two : ScaleRule::quotient,
              .scale_type = format.fp8.packed ? ScaleType::exponent : ScaleType::fp32,
              .scale_columns = format.fp8.column_major,
              .block = kFp8Block};
    case FormatKind::mxfp8:
      return mx_encoding(format.mx, ElementType::e4m3);
    case FormatKind::mxfp4:
      return mx_encoding(format.mx, ElementType::e2m1);
    case FormatKind::nvfp4:
      return {.element = ElementType::e2m1,
              .rule = ScaleRule::two_level,
              .scale_type = ScaleType::e4m3,
              .row_scale = format.nvfp4_options.per_token,
              .scale_columns = format.nvfp4_options.column_major,
              .scale_tiles = format.nvfp4_options.tiles,
              .block = kNvfp4Block};
    case FormatKind::registered:
      return {.element = ElementType::bytes, .by_caller = true};
    case FormatKind::raw:
      break;
  }
  return {.element = ElementType::bytes};
}

bool Format::quantises() const {
  const Encoding encoding = encoding_of(*this);
  return encoding.quantises() || encoding.by_caller;
}

bool Format::is_raw() const {
  const Encoding encoding = encoding_of(*this);
  return encoding.element == ElementType::bytes && !encoding.by_caller;
}

std::optional<DType> Format::value_type() const {
  return dtype_of(encoding_of(*this).element);
}

}  // namespace ferry
