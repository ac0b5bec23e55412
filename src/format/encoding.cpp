#include "format/encoding.hpp"

#include "format/blocks.hpp"

namespace ferry {
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
