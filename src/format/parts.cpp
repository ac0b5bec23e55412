#include "format/parts.hpp"

#include "base/text.hpp"
#include "ferry/error.hpp"
#include "format/registry.hpp"

namespace ferry {
namespace {

PartLayout row_part(std::int64_t row_bytes) {
  return {
      .wire_bytes = padded(row_bytes), .row_bytes = row_bytes, .element_bytes = row_bytes, .columns = false};
}

PartLayout scale_part(const Encoding& encoding, std::int64_t hidden) {
  PartLayout part = row_part(encoding.scale_bytes(hidden));
  part.columns = encoding.scale_columns;
  part.tiles = encoding.scale_tiles;
  if (part.columns || part.tiles) part.element_bytes = kScaleBytes;
  return part;
}

const char* name_of(ElementType element) {
  constexpr const char* kNames[] = {"bf16", "fp16", "fp32", "e4m3", "e2m1", "bytes"};
  return kNames[static_cast<int>(element)];
}

// `stage`: "before encoding" or "after encoding", for the message.
void check_row_bytes(const Format& format, std::int64_t hidden, const char* stage, const char* type,
                     int value_bits) {
  const std::int64_t bytes = hidden * value_bits / 8;
  if (hidden * value_bits % (8 * kRowAlignment) == 0) return;
  throw UsageError(str("format ", to_string(format), ": a row of ", hidden, " ", type, " values is ",
                       counted(bytes, "byte"), " ", stage, ", must be a multiple of ", kRowAlignment,
                       ": make hidden a multiple of ", 8 * kRowAlignment / value_bits));
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
      throw UsageError(str("format raw: part ", p, " is ", counted(bytes, "byte"), ", must be a multiple of ",
                           kRowAlignment, " from ", kRowAlignment, " to ", kMaxPartBytes));
    }
  }
}

}  // namespace

PartList parts_of(const Format& format, std::int64_t hidden) {
  PartList list;
  const auto add = [&list](const PartLayout& part) { list.part[list.count++] = part; };
  const Encoding encoding = encoding_of(format);
  if (encoding.element == ElementType::bytes) {
    for (const std::int64_t bytes : as_raw(format, hidden).part_bytes) {
      if (bytes > 0) add(row_part(bytes));
    }
    return list;
  }
  add(row_part(encoding.value_bytes(hidden)));
  if (encoding.block > 0) add(scale_part(encoding, hidden));
  if (encoding.row_scale) add(row_part(kScaleBytes));
  return list;
}

PartList parts_by_expert(const Format& format, std::int64_t hidden) {
  PartList list = parts_of(format, hidden);
  if (!encoding_of(format).is_microscaled()) list.count = 1;
  return list;
}

PartLayout largest_scale_tiles(std::int64_t hidden) {
  return parts_of(Format::nvfp4({.tiles = true}), hidden).part[1];
}

PartList value_parts(DType type, std::int64_t hidden) {
  PartList list;
  list.part[list.count++] = row_part(hidden * bytes_of(type));
  return list;
}

void check_format(const Format& format, std::int64_t hidden, DType input) {
  if (format.kind < FormatKind::bf16 || format.kind > kLastFormatKind) {
    throw UsageError(str("format: kind ", static_cast<int>(format.kind), " is unknown, must be 0 to ",
                         static_cast<int>(kLastFormatKind)));
  }
  const Encoding encoding = encoding_of(format);
  if (encoding.by_caller) {
    if (hidden <= 0)
      throw UsageError(str("format ", to_string(format), ": hidden = ", hidden, ", must be positive"));
    as_raw(format, hidden);
    return check_row_bytes(format, hidden, "before encoding", to_string(input),
                           static_cast<int>(8 * bytes_of(input)));
  }
  if (encoding.element == ElementType::bytes) return check_raw(format);
  if (!encoding.quantises() && input != dtype_of(encoding.element)) {
    throw UsageError(str("format ", to_string(format), " takes ", to_string(format),
                         " tokens, but the tokens are ", to_string(input), ": convert the tokens to ",
                         to_string(format), ", or choose the format ", to_string(input)));
  }
  if (encoding.packs_scales() && encoding.rule == ScaleRule::quotient) {
    throw UsageError(
        str("format ", to_string(format), ": packed scales must be powers of two: set power_of_two too"));
  }
  if (encoding.scale_columns && encoding.scale_tiles) {
    throw UsageError(str("format ", to_string(format),
                         ": column_major and tiles exclude each other: scales have one layout"));
  }
  if (hidden <= 0)
    throw UsageError(str("format ", to_string(format), ": hidden = ", hidden, ", must be positive"));
  if (encoding.quantises())
    check_row_bytes(format, hidden, "after encoding", name_of(encoding.element), bits_of(encoding.element));
  check_row_bytes(format, hidden, "before encoding", to_string(input), static_cast<int>(8 * bytes_of(input)));
}

}  // namespace ferry
