// Values that a caller passes to Evaluator::run().
#include "ferry/evaluator.hpp"

namespace ferry {

ProgramValue ProgramValue::tokens(const void* data, std::int64_t rows, DType type, std::int64_t stride) {
  return {.kind = ValueKind::tokens,
          .data = const_cast<void*>(data),
          .rows = rows,
          .stride = stride,
          .type = type};
}
ProgramValue ProgramValue::ids(const Ids& ids, std::int64_t rows) {
  return {.kind = ValueKind::ids, .data = const_cast<void*>(ids.data), .rows = rows, .id_type = ids.type};
}
ProgramValue ProgramValue::weights(const float* data, std::int64_t rows) {
  return {.kind = ValueKind::weights, .data = const_cast<float*>(data), .rows = rows};
}
ProgramValue ProgramValue::number(std::int32_t count) {
  return {.kind = ValueKind::count, .count = count};
}
ProgramValue ProgramValue::device_number(const std::int32_t* count) {
  return {.kind = ValueKind::count, .device_count = const_cast<std::int32_t*>(count)};
}

}  // namespace ferry
