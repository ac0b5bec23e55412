#include "format/parts.hpp"

#include "base/text.hpp"
#include "ferry/error.hpp"

namespace ferry {
namespace {

PartLayout row_part(std::int64_t row_bytes) {
  return {
      .wire_bytes = padded(row_bytes), .row_bytes = row_bytes, .element_bytes = row_bytes, .columns = false};
}

PartLayout scale_part(const Fp8Options& options, std::int64_t hidden) {
  const std::int64_t blocks = fp8_blocks(hidden);
  const std::int64_t words = options.packed ? (blocks + 3) / 4 : blocks;
  PartLayout part = row_part(words * kScaleBytes);
  part.columns = options.column_major;
  if (part.columns) part.element_bytes = kScaleBytes;
  return part;
}

// The value type of formats bf16, fp16 and fp32.
DType value_type(FormatKind kind) {
  return kind == FormatKind::bf16 ? DType::bf16 : kind == FormatKind::fp16 ? DType::fp16 : DType::fp32;
}

// `stage`: "before encoding" or "after encoding", for the message.
void check_row_bytes(const Format& format, std::int64_t hidden, const char* stage, const char* type,
                     std::int64_t bytes) {
  if (bytes % kRowAlignment == 0) return;
  throw UsageError(str("format ", to_string(format), ": a row of ", hidden, " ", type, " values is ", bytes,
                       " bytes ", stage, ", must be a multiple of ", kRowAlignment));
}

void check_raw(const Format& format) {
  bool has_gap = false;
  for (int p = 0; p < kMaxParts; ++p) {
    const std::int64_t bytes = format.part_bytes[p];
    if (bytes == 0 && p > 0) {
      has_gap = true;
      continue;
    }
    if (has_gap) throw UsageError(str("format raw: part ", p, " follows a part of 0 bytes: leave no gaps"));
    if (bytes <= 0 || bytes % kRowAlignment != 0 || bytes > kMaxPartBytes) {
      throw UsageError(str("format raw: part ", p, " is ", bytes, " bytes, must be a multiple of ",
                           kRowAlignment, " from ", kRowAlignment, " to ", kMaxPartBytes));
    }
  }
}

}  // namespace

PartList parts_of(const Format& format, std::int64_t hidden) {
  PartList list;
  const auto add = [&list](const PartLayout& part) { list.part[list.count++] = part; };
  switch (format.kind) {
    case FormatKind::bf16:
    case FormatKind::fp16:
    case FormatKind::fp32:
      add(row_part(hidden * bytes_of(value_type(format.kind))));
      break;
    case FormatKind::fp8_e4m3:
      add(row_part(hidden));
      add(scale_part(format.fp8, hidden));
      break;
    case FormatKind::raw:
      for (const std::int64_t bytes : format.part_bytes) {
        if (bytes > 0) add(row_part(bytes));
      }
      break;
  }
  return list;
}

void check_format(const Format& format, std::int64_t hidden, DType input) {
  switch (format.kind) {
    case FormatKind::bf16:
    case FormatKind::fp16:
    case FormatKind::fp32:
      if (input != value_type(format.kind)) {
        throw UsageError(str("format ", to_string(format), " takes ", to_string(format),
                             " tokens, but the tokens are ", to_string(input)));
      }
      break;
    case FormatKind::fp8_e4m3:
      if (format.fp8.packed && !format.fp8.power_of_two) {
        throw UsageError(
            str("format ", to_string(format), ": packed scales must be powers of two: set power_of_two too"));
      }
      check_row_bytes(format, hidden, "after encoding", "fp8", hidden);
      break;
    case FormatKind::raw:
      return check_raw(format);
    default:
      throw UsageError(str("format: kind ", static_cast<int>(format.kind), " is unknown, must be 0 to ",
                           static_cast<int>(FormatKind::raw)));
  }
  if (hidden <= 0)
    throw UsageError(str("format ", to_string(format), ": hidden = ", hidden, ", must be positive"));
  check_row_bytes(format, hidden, "before encoding", to_string(input), hidden * bytes_of(input));
}

}  // namespace ferry
