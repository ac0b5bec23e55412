// Calls the functions for host and device from device code. Compile-only: a function that cannot run on a
// device is a compile error.
#include <cstdint>

#include "format/blocks.hpp"
#include "format/numbers.hpp"
#include "format/parts.hpp"
#include "layout/exchange_layout.hpp"
#include "layout/plan_layout.hpp"

namespace ferry {

__global__ void use_formats(const float* values, float* results) {
  const float value = values[threadIdx.x];
  const BlockScale scale =
      fp8_scale(value, threadIdx.x % 2 == 0 ? ScaleRule::power_of_two : ScaleRule::quotient);
  float sum = fused_multiply_add(scale.scale, scale.factor, canonical(value));
  sum += bf16_to_fp32(fp32_to_bf16(value));
  sum += fp16_to_fp32(fp32_to_fp16(value));
  sum += e4m3_to_fp32(fp32_to_e4m3(value));
  sum += static_cast<float>(biased_exponent(value));
  sum += mx_scale(value, ScaleRule::mx_up, ElementType::e2m1).factor + e2m1_to_fp32(fp32_to_e2m1(value));
  results[threadIdx.x] = sum;
}

__global__ void use_parts(PartList parts, void* base, const void* wire, std::int64_t capacity) {
  std::int64_t row = threadIdx.x;
  const RowRoom room{capacity, 1, capacity};
  const std::int64_t leading = leading_dimension(parts.part[0], room);
  if (row * parts.part[0].row_bytes >= part_bytes_total(parts.part[0], room)) return;
  row = column_row(parts.part[0], row, room.group_rows, leading);
  store_part_row(parts.part[0], base, row, leading, wire);
  zero_part_row(parts.part[0], base, row + 1, leading);
}

__global__ void use_decoding(Encoding encoding, PartList parts, const void* values, const void* scales,
                             float* results) {
  results[threadIdx.x] = quantised_element(encoding, values, threadIdx.x) *
                         received_scale(encoding, parts.part[1], scales, 0, 0, threadIdx.x / encoding.block);
}

__global__ void use_layouts(ExchangeShape exchange, PlanShape plan, PartList parts, void* storage,
                            std::int64_t* sizes) {
  sizes[0] = exchange_layout(exchange).bytes();
  sizes[1] = message_layout(parts, plan.top_k).bytes;
  sizes[2] = static_cast<std::int64_t>(header_check(*view_plan(storage, plan).header));
}

}  // namespace ferry
