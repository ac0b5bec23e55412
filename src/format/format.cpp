#include "ferry/format.hpp"

#include <algorithm>
#include <charconv>
#include <string_view>

#include "base/text.hpp"
#include "ferry/error.hpp"
#include "format/parts.hpp"

namespace ferry {
namespace {

constexpr std::string_view kRawPrefix = "raw:";

[[noreturn]] void refuse(std::string_view name, std::string_view reason) {
  throw UsageError(str("format '", name, "': ", reason,
                       "; known: bf16, fp16, fp32, fp8[-columns][-pow2[-packed]], raw:<bytes>[+<bytes>]..."));
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

Format parse_fp8(std::string_view name) {
  Fp8Options options;
  std::string_view rest = name.substr(std::string_view("fp8").size());
  while (!rest.empty()) {
    const std::size_t end = std::min(rest.find('-', 1), rest.size());
    const std::string_view word = rest.substr(0, end);
    bool* const option = word == "-columns"  ? &options.column_major
                         : word == "-pow2"   ? &options.power_of_two
                         : word == "-packed" ? &options.packed
                                             : nullptr;
    if (option == nullptr) refuse(name, str("'", word, "' is not an option of fp8"));
    if (*option) refuse(name, str("'", word, "' is given twice"));
    *option = true;
    rest.remove_prefix(end);
  }
  if (options.packed && !options.power_of_two) refuse(name, "packed scales need -pow2");
  return Format::fp8_e4m3(options);
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
      return "bf16";
    case FormatKind::fp16:
      return "fp16";
    case FormatKind::fp32:
      return "fp32";
    case FormatKind::fp8_e4m3:
      return str("fp8", format.fp8.column_major ? "-columns" : "", format.fp8.power_of_two ? "-pow2" : "",
                 format.fp8.packed ? "-packed" : "");
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
  if (name == "fp8" || name.starts_with("fp8-")) return parse_fp8(name);
  if (name.starts_with(kRawPrefix)) return parse_raw(name);
  refuse(name, "unknown");
}

}  // namespace ferry
