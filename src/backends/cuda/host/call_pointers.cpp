#include "backends/cuda/host/call_pointers.hpp"

#include "exchange/overlap.hpp"

namespace ferry::cuda {
namespace {

constexpr std::int64_t kRows = 16;  // alignment of rows and plans, which are accessed 16 bytes at a time
constexpr std::int64_t kWords = 4;  // of fp32 and int32 values

}  // namespace

CallPointers pointers_of(const DispatchCall& call) {
  CallPointers pointers;
  if (call.tokens.count > 0) {
    for (std::size_t p = 0; p < kMaxParts; ++p) pointers.add(kTokenParts[p], call.tokens.parts[p], kRows);
    pointers.add("ids", call.ids.data, bytes_of(call.ids.type));
    pointers.add("weights", call.weights, kWords);
  }
  pointers.add("device_count", call.tokens.device_count, kWords);
  pointers.add("plan", call.plan.storage(), kRows);
  pointers.add("dot_rows", call.dot_rows, kRows);
  pointers.add("global_scale", call.global_scale, kWords);
  pointers.add("input_scales", call.input_scales.data(), kWords);
  const ReceiveBuffers& memory = call.memory;
  for (std::size_t p = 0; p < kMaxParts; ++p) pointers.add(kReceivedParts[p], memory.parts[p], kRows);
  pointers.add("memory.weight", memory.weight, kWords);
  pointers.add("memory.local_ids", memory.local_ids, kWords);
  pointers.add("memory.group_of_row", memory.group_of_row, kWords);
  pointers.add("memory.plan", memory.plan, kRows);
  pointers.add("memory.counts", memory.counts, kWords);
  pointers.add("memory.row_offsets", memory.row_offsets, kWords);
  pointers.add("memory.dots", memory.dots, kWords);
  pointers.add("memory.count_sums", memory.count_sums, kWords);
  return pointers;
}

CallPointers pointers_of(const CombineCall& call) {
  CallPointers pointers;
  pointers.add("outputs", call.outputs.data, kRows);
  pointers.add("result", call.result.data, kRows);
  pointers.add("plan", call.plan.storage(), kRows);
  pointers.add("row_weights", call.row_weights, kWords);
  pointers.add("topk_weights", call.topk_weights, kWords);
  pointers.add("row_values", call.row_values, kWords);
  pointers.add("route_values", call.route_values, kWords);
  pointers.add("shared_outputs", call.shared_outputs, kRows);
  pointers.add("residual", call.epilogue.residual, kRows);
  return pointers;
}

CallPointers pointers_of(const NumberCall& call) {
  CallPointers pointers;
  pointers.add("device_count", call.number.device, kWords);
  pointers.add("into", call.into, kWords);
  return pointers;
}

CallPointers pointers_of(const RouteValuesCall& call) {
  CallPointers pointers;
  pointers.add(call.returns() ? "row_values" : "values", call.from, kWords);
  pointers.add("plan", call.plan.storage(), kRows);
  pointers.add(call.returns() ? "route_values" : "row_values", call.to, kWords);
  return pointers;
}

CallPointers pointers_of(const DispatchCountsCall& call) {
  CallPointers pointers;
  if (call.tokens > 0) pointers.add("ids", call.ids.data, bytes_of(call.ids.type));
  return pointers;
}

CallPointers pointers_of(const GatherCall& call) {
  CallPointers pointers;
  const std::int64_t alignment = call.adds() ? bytes_of(call.type) : 1;
  if ((call.adds() ? call.held : call.count) > 0) pointers.add("rows", call.rows, alignment);
  if ((call.adds() ? call.count : call.held) > 0)
    pointers.add(call.adds() ? "sums" : "gathered", call.out, alignment);
  pointers.add("device_count", call.device_count, kWords);
  return pointers;
}

}  // namespace ferry::cuda
