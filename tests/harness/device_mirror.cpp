#include "harness/device_mirror.hpp"

#include <algorithm>
#include <cstring>

#include "format/parts.hpp"

namespace ferry::contract {

void DeviceMirror::begin() {
  blocks_.clear();
  plans_.clear();
}

const void* DeviceMirror::device_pointer(const void* pointer) {
  if (!on_device_ || pointer == nullptr) return pointer;
  if (const auto found = originals_.find(pointer); found != originals_.end()) return found->second;
  const device::Block block = device::block_of(pointer);
  if (block.mirror == nullptr) return pointer;
  const bool uploaded = std::any_of(blocks_.begin(), blocks_.end(),
                                    [&](const device::Block& each) { return each.host == block.host; });
  if (!uploaded) {
    device::copy(block.mirror, block.host, block.bytes);
    blocks_.push_back(block);
  }
  return block.mirror + (static_cast<const std::byte*>(pointer) - block.host);
}

Tokens DeviceMirror::translate(Tokens tokens) {
  for (const void*& part : tokens.parts) part = device_pointer(part);
  tokens.device_count = translate(tokens.device_count);
  return tokens;
}

Ids DeviceMirror::translate(Ids ids) {
  ids.data = device_pointer(ids.data);
  return ids;
}

Plan DeviceMirror::translate(const Plan& plan) {
  if (!on_device_ || plan.empty()) return plan;
  const bool is_host_copy = originals_.contains(plan.storage()),
             in_block = device::block_of(plan.storage()).bytes > 0;
  if (is_host_copy || in_block || device::in_device_memory(plan.storage())) {
    return Plan::over(translate(plan.storage()), plan.bytes());
  }
  GuardedBuffer& copy = plans_.emplace_back(static_cast<std::int64_t>(plan.bytes()));
  std::memcpy(copy.data(), plan.storage(), plan.bytes());
  return Plan::over(translate(copy.data()), plan.bytes());
}

DispatchOptions DeviceMirror::translate(DispatchOptions options) {
  for (void*& part : options.memory.parts) part = translate(part);
  options.memory.weight = translate(options.memory.weight);
  options.memory.local_ids = translate(options.memory.local_ids);
  options.memory.group_of_row = translate(options.memory.group_of_row);
  options.memory.plan = translate(options.memory.plan);
  options.memory.counts = translate(options.memory.counts);
  options.memory.row_offsets = translate(options.memory.row_offsets);
  options.memory.dots = translate(options.memory.dots);
  options.memory.count_sums = translate(options.memory.count_sums);
  options.dot_rows = device_pointer(options.dot_rows);
  options.global_scale = translate(options.global_scale);
  options.input_scales = {translate(options.input_scales.data()), options.input_scales.size()};
  return options;
}

Outputs DeviceMirror::translate(Outputs outputs) {
  outputs.data = device_pointer(outputs.data);
  return outputs;
}

Result DeviceMirror::translate(Result result) {
  result.data = translate(result.data);
  return result;
}

CombineOptions DeviceMirror::translate(CombineOptions options) {
  options.row_weights = translate(options.row_weights);
  options.topk_weights = translate(options.topk_weights);
  options.row_values = translate(options.row_values);
  options.route_values = translate(options.route_values);
  options.shared_outputs = translate(options.shared_outputs);
  options.epilogue.residual = device_pointer(options.epilogue.residual);
  return options;
}

void DeviceMirror::upload() {
  for (const device::Block& block : blocks_) device::copy(block.mirror, block.host, block.bytes);
}

void DeviceMirror::download() {
  for (const device::Block& block : blocks_) device::copy(block.host, block.mirror, block.bytes);
}

const void* DeviceMirror::host_copy(const void* pointer, std::int64_t bytes) {
  if (pointer == nullptr) return nullptr;
  if (const void* host = device::host_of(pointer)) return host;
  if (!device::in_device_memory(pointer)) return pointer;
  GuardedBuffer& copy = copies_.emplace_back(bytes);
  device::copy(copy.data(), pointer, bytes);
  originals_[copy.data()] = pointer;
  return copy.data();
}

DispatchResult DeviceMirror::to_host(const DispatchResult& received, const Config& config,
                                     const PartList& parts, std::int64_t rows) {
  if (!on_device_) return received;
  originals_.clear();
  copies_.clear();
  DispatchResult local = received;
  replace_by_host_copy(local.counts, received.groups);
  replace_by_host_copy(local.row_offsets, received.groups + 1);
  replace_by_host_copy(local.group_expert, received.groups);
  replace_by_host_copy(local.total, 1);
  const std::int64_t total = std::clamp<std::int64_t>(*local.total, 0, rows);
  const std::int64_t slots = config.layout == Layout::rank_major ? config.top_k : 1;
  replace_by_host_copy(local.source, total);
  replace_by_host_copy(local.weight, total * slots);
  replace_by_host_copy(local.local_ids, total * slots);
  replace_by_host_copy(local.group_of_row, total);
  replace_by_host_copy(local.dots, total);
  replace_by_host_copy(local.tile_offsets, received.groups + 1);
  for (int p = 0; p < parts.count; ++p) {
    void*& data = local.parts[static_cast<std::size_t>(p)].data;
    const RowRoom room{.rows = parts.part[p].columns || parts.part[p].tiles ? rows : total,
                       .groups = received.groups,
                       .group_rows = config.layout == Layout::expert_padded ? received.capacity : 0};
    data = const_cast<void*>(host_copy(data, part_bytes_total(parts.part[p], room)));
  }
  local.data = local.parts[0].data;
  const auto plan_bytes = static_cast<std::int64_t>(received.plan.bytes());
  local.plan =
      Plan::over(const_cast<void*>(host_copy(received.plan.storage(), plan_bytes)), received.plan.bytes());
  return local;
}

}  // namespace ferry::contract
