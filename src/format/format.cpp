#include "ferry/format.hpp"

#include <algorithm>
#include <charconv>
#include <span>
#include <string_view>

#include "base/text.hpp"
#include "ferry/error.hpp"
#include "format/encoding.hpp"
#include "format/parts.hpp"
#include "format/registry.hpp"

namespace ferry {
namespace {

constexpr std::string_view kRawPrefix = "raw:";

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

// An option of a format's name, such as "-columns", and whether it was given.
struct NamedOption {
  std::string_view word;
  bool given = false;
};

// Reads the options after the format's own name, `base`.
void parse_options(std::string_view name, std::string_view base, std::span<NamedOption> known) {
  std::string_view rest = name.substr(base.size());
  while (!rest.empty()) {
    const std::size_t end = std::min(rest.find('-', 1), rest.size());
    const std::string_view word = rest.substr(0, end);
    const auto option =
        std::find_if(known.begin(), known.end(), [&](const auto& o) { return o.word == word; });
    if (option == known.end()) refuse(name, str("'", word, "' is not an option of ", base));
    if (option->given) refuse(name, str("'", word, "' is given twice"));
    option->given = true;
    rest.remove_prefix(end);
  }
}

Format parse_fp8(std::string_view name) {
  NamedOption options[] = {{"-columns"}, {"-pow2"}, {"-packed"}};
  parse_options(name, "fp8", options);
  const auto& [columns, power_of_two, packed] = options;
  if (packed.given && !power_of_two.given) refuse(name, "packed scales need -pow2");
  return Format::fp8_e4m3(
      {.column_major = columns.given, .power_of_two = power_of_two.given, .packed = packed.given});
}

Format parse_mx(std::string_view name, std::string_view base, Format format) {
  NamedOption options[] = {{"-up"}, {"-ocp"}, {"-columns"}, {"-tiles"}};
  parse_options(name, base, options);
  const auto& [up, ocp, columns, tiles] = options;
  if (up.given && ocp.given) refuse(name, "-up and -ocp exclude each other");
  if (up.given || ocp.given) format.mx.rule = up.given ? MxRule::up : MxRule::ocp;
  if (columns.given && tiles.given) refuse(name, "-columns and -tiles exclude each other");
  format.mx.column_major = columns.given;
  format.mx.tiles = tiles.given;
  return format;
}

Format parse_nvfp4(std::string_view name) {
  NamedOption options[] = {{"-token"}, {"-columns"}, {"-tiles"}};
  parse_options(name, "nvfp4", options);
  const auto& [token, columns, tiles] = options;
  if (columns.given && tiles.given) refuse(name, "-columns and -tiles exclude each other");
  return Format::nvfp4({.per_token = token.given, .column_major = columns.given, .tiles = tiles.given});
}

// Whether `name` is `base`, with or without options.
bool names(std::string_view name, std::string_view base) {
  return name == base || name.starts_with(std::string(base) + "-");
}

std::string mx_name(const Format& format, MxRule usual) {
  const char* rule = format.mx.rule == usual ? "" : format.mx.rule == MxRule::up ? "-up" : "-ocp";
  return str(to_string(format.kind), rule, format.mx.column_major ? "-columns" : "",
             format.mx.tiles ? "-tiles" : "");
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
  switch (format.kind) {
    case FormatKind::bf16:
    case FormatKind::fp16:
    case FormatKind::fp32:
      return to_string(format.kind);
    case FormatKind::fp8_e4m3:
      return str("fp8", format.fp8.column_major ? "-columns" : "", format.fp8.power_of_two ? "-pow2" : "",
                 format.fp8.packed ? "-packed" : "");
    case FormatKind::mxfp8:
      return mx_name(format, MxRule::up);
    case FormatKind::mxfp4:
      return mx_name(format, MxRule::ocp);
    case FormatKind::nvfp4:
      return str("nvfp4", format.nvfp4_options.per_token ? "-token" : "",
                 format.nvfp4_options.column_major ? "-columns" : "",
                 format.nvfp4_options.tiles ? "-tiles" : "");
    case FormatKind::registered:
      return name_of_registered(format);
    case FormatKind::raw:
      break;
  }
  std::string name(kRawPrefix);
  for (int part = 0; part < kMaxParts && format.part_bytes[part] != 0; ++part) {
    name += str(part == 0 ? "" : "+", format.part_bytes[part]);
  }
  return name;
}

Format parse_format(const std::string& name) {
  if (name == "bf16") return Format::bf16();
  if (name == "fp16") return Format::fp16();
  if (name == "fp32") return Format::fp32();
  if (names(name, "fp8")) return parse_fp8(name);
  if (names(name, "mxfp8")) return parse_mx(name, "mxfp8", Format::mxfp8());
  if (names(name, "mxfp4")) return parse_mx(name, "mxfp4", Format::mxfp4());
  if (names(name, "nvfp4")) return parse_nvfp4(name);
  if (name.starts_with(kRawPrefix)) return parse_raw(name);
  if (const std::optional<Format> registered = find_registered(name)) return *registered;
  refuse(name, "unknown");
}

}  // namespace ferry
