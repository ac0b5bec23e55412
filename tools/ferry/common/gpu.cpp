#include "tools/ferry/common/gpu.hpp"

#include <fmt/core.h>

#include "backends/nvshmem/session.hpp"
#include "format/parts.hpp"
#include "tools/ferry/limits/gpu_limits.hpp"

namespace ferry::app {

void use_gpu_of_rank(int rank) {
  int gpus = 0;
  cuda::check(cudaGetDeviceCount(&gpus), "count the GPUs");
  cuda::check(cudaSetDevice(rank % gpus), "select a GPU");
}

DispatchResult ResultOnHost::copy(const DispatchResult& received, const Config& config) {
  DispatchResult local = copy_row_positions(received, config);
  const bool padded = config.layout == Layout::expert_padded;
  const std::int64_t capacity = local.capacity * (padded ? local.groups : 1);
  const PartList parts = parts_of(config.format, config.hidden);
  for (int p = 0; p < parts.count; ++p) {
    void*& data = local.parts[static_cast<std::size_t>(p)].data;
    const RowRoom room{.rows = parts.part[p].columns ? capacity : *local.total,
                       .groups = local.groups,
                       .group_rows = padded ? local.capacity : 0};
    data = copied(data, part_bytes_total(parts.part[p], room));
  }
  local.data = local.parts[0].data;
  const std::size_t plan_bytes = received.plan.bytes();
  local.plan = Plan::over(copied(received.plan.storage(), static_cast<std::int64_t>(plan_bytes)), plan_bytes);
  return local;
}

DispatchResult ResultOnHost::copy_row_positions(const DispatchResult& received, const Config& config) {
  copies_.clear();
  DispatchResult local = received;
  move_to_host(local.counts, local.groups);
  move_to_host(local.row_offsets, local.groups + 1);
  move_to_host(local.group_expert, local.groups);
  move_to_host(local.tile_offsets, local.groups + 1);
  move_to_host(local.total, 1);
  const std::int64_t total = *local.total;
  const std::int64_t slots = config.layout == Layout::rank_major ? config.top_k : 1;
  move_to_host(local.source, total);
  move_to_host(local.weight, total * slots);
  move_to_host(local.local_ids, total * slots);
  return local;
}

template <class T>
void ResultOnHost::move_to_host(T*& pointer, std::int64_t count) {
  pointer = static_cast<T*>(copied(pointer, count * static_cast<std::int64_t>(sizeof(T))));
}

void* ResultOnHost::copied(const void* device, std::int64_t bytes) {
  if (device == nullptr) return nullptr;
  std::vector<std::byte>& copy =
      copies_.emplace_back(static_cast<std::size_t>(bytes) + 1);  // the +1: never a null pointer
  copy_to_host(copy.data(), device, bytes);
  return copy.data();
}

std::string found_nvshmem() {
  int major = 0, minor = 0, patch = 0;
  nvshmem::load_module().version(&major, &minor, &patch);
  return fmt::format("{}.{}.{}, {}", major, minor, patch, nvshmem::library_path());
}

}  // namespace ferry::app
