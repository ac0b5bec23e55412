#include "harness/device_mirror.hpp"

#include <algorithm>
#include <cstring>

#include "format/parts.hpp"

namespace ferry::contract {

void CallMemory::begin() {
  blocks_.clear();
  plans_.clear();
}

const void* CallMemory::give(const void* pointer) {
  if (!on_device_ || pointer == nullptr) return pointer;
  if (const auto found = originals_.find(pointer); found != originals_.end()) return found->second;
  const device::Block block = device::block_of(pointer);
  if (block.twin == nullptr) return pointer;
  const bool known = std::any_of(blocks_.begin(), blocks_.end(),
                                 [&](const device::Block& each) { return each.host == block.host; });
  if (!known) {
    device::copy(block.twin, block.host, block.bytes);
    blocks_.push_back(block);
  }
  return block.twin + (static_cast<const std::byte*>(pointer) - block.host);
}

Tokens CallMemory::given(Tokens tokens) {
  for (const void*& part : tokens.parts) part = give(part);
  tokens.device_count = given(tokens.device_count);
  return tokens;
}

Ids CallMemory::given(Ids ids) {
  ids.data = give(ids.data);
  return ids;
}

Plan CallMemory::given(const Plan& plan) {
  if (!on_device_ || plan.empty()) return plan;
  const bool is_copy = originals_.contains(plan.storage()),
             reachable = device::block_of(plan.storage()).bytes > 0;
  if (is_copy || reachable || device::in_device_memory(plan.storage())) {
    return Plan::over(given(plan.storage()), plan.bytes());
  }
  Buffer& reached = plans_.emplace_back(static_cast<std::int64_t>(plan.bytes()));
  std::memcpy(reached.data(), plan.storage(), plan.bytes());
  return Plan::over(given(reached.data()), plan.bytes());
}

DispatchOptions CallMemory::given(DispatchOptions options) {
  for (void*& part : options.memory.parts) part = given(part);
  options.memory.weight = given(options.memory.weight);
  options.memory.local_ids = given(options.memory.local_ids);
  options.memory.group_of_row = given(options.memory.group_of_row);
  options.memory.plan = given(options.memory.plan);
  options.memory.counts = given(options.memory.counts);
  options.memory.row_offsets = given(options.memory.row_offsets);
  options.memory.dots = given(options.memory.dots);
  options.dot_rows = give(options.dot_rows);
  return options;
}

Outputs CallMemory::given(Outputs outputs) {
  outputs.data = give(outputs.data);
  return outputs;
}

Result CallMemory::given(Result result) {
  result.data = given(result.data);
  return result;
}

CombineOptions CallMemory::given(CombineOptions options) {
  options.row_weights = given(options.row_weights);
  options.topk_weights = given(options.topk_weights);
  options.row_values = given(options.row_values);
  options.route_values = given(options.route_values);
  return options;
}

void CallMemory::refresh() {
  for (const device::Block& block : blocks_) device::copy(block.twin, block.host, block.bytes);
}

void CallMemory::bring_back() {
  for (const device::Block& block : blocks_) device::copy(block.host, block.twin, block.bytes);
}

const void* CallMemory::host_copy(const void* pointer, std::int64_t bytes) {
  if (pointer == nullptr) return nullptr;
  if (const void* host = device::host_of(pointer)) return host;
  if (!device::in_device_memory(pointer)) return pointer;
  Buffer& copy = copies_.emplace_back(bytes);
  device::copy(copy.data(), pointer, bytes);
  originals_[copy.data()] = pointer;
  return copy.data();
}

DispatchResult CallMemory::on_host(const DispatchResult& received, const Config& config, const Format& format,
                                   std::int64_t rows) {
  if (!on_device_) return received;
  originals_.clear();
  copies_.clear();
  DispatchResult local = received;
  bring(local.counts, received.groups);
  bring(local.row_offsets, received.groups + 1);
  bring(local.group_expert, received.groups);
  bring(local.total, 1);
  const std::int64_t total = std::clamp<std::int64_t>(*local.total, 0, rows);
  const std::int64_t slots = config.layout == Layout::rank_major ? config.top_k : 1;
  bring(local.source, total);
  bring(local.weight, total * slots);
  bring(local.local_ids, total * slots);
  bring(local.group_of_row, total);
  bring(local.dots, total);
  const PartList parts = parts_of(format, config.hidden);
  for (int p = 0; p < parts.count; ++p) {
    void*& data = local.parts[static_cast<std::size_t>(p)].data;
    const std::int64_t held = parts.part[p].columns ? rows : total;
    data = const_cast<void*>(host_copy(data, part_bytes_total(parts.part[p], held)));
  }
  local.data = local.parts[0].data;
  const auto plan_bytes = static_cast<std::int64_t>(received.plan.bytes());
  local.plan =
      Plan::over(const_cast<void*>(host_copy(received.plan.storage(), plan_bytes)), received.plan.bytes());
  return local;
}

}  // namespace ferry::contract
