#include "backends/cuda/memory/symmetric.hpp"

#include <algorithm>
#include <cstring>
#include <span>

#include "backends/cuda/memory/device_memory.hpp"
#include "backends/cuda/runtime/driver.hpp"
#include "backends/cuda/runtime/error.hpp"
#include "base/published_handle.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"
#include "group/agreement.hpp"
#include "memory/symmetric_memory.hpp"

namespace ferry::cuda {

namespace {

CUuuid uuid_of(int device) {
  CUuuid uuid{};
  check(driver().device_get_uuid(&uuid, handle_of(device)), "query a device's UUID");
  return uuid;
}

bool same(const CUuuid& a, const CUuuid& b) {
  return std::memcmp(&a, &b, sizeof a) == 0;
}

// The device with that UUID as this process numbers it, or -1.
int find_device(const CUuuid& uuid) {
  int count = 0;
  check(cudaGetDeviceCount(&count), "count the devices");
  for (int device = 0; device < count; ++device) {
    if (same(uuid_of(device), uuid)) return device;
  }
  return -1;
}

// The current device. Initialises it, which the driver's functions require.
int initialise_device() {
  int device = 0;
  check(cudaGetDevice(&device), "find the current device");
  check(cudaSetDevice(device), "use the current device");
  return device;
}

std::int64_t round_up(std::int64_t bytes, std::int64_t granularity) {
  return (std::max<std::int64_t>(bytes, 1) + granularity - 1) / granularity * granularity;
}

}  // namespace

// A rank's device, exchanged between the ranks.
struct DeviceSymmetricMemory::DeviceInfo {
  CUuuid uuid;
  int device;                // as the rank's own process numbers it
  std::int64_t granularity;  // bytes
};

DeviceSymmetricMemory::DeviceSymmetricMemory(const Rank& rank, std::int64_t bytes)
    : rank_(rank.index()), bytes_(bytes), devices_(rank.size(), -1), regions_(rank.size()) {
  require_same_size(rank, bytes);
  gather_devices(rank);
  if (rank.same_process()) {
    share_with_threads(rank);
  } else {
    share_with_processes(rank);
  }
}

void DeviceSymmetricMemory::gather_devices(const Rank& rank) {
  DeviceInfo mine{};
  run_on_all_ranks(rank, [&] {
    mine.device = initialise_device();
    mine.uuid = uuid_of(mine.device);
    mine.granularity = Allocation::granularity(mine.device, !rank.same_process());
  });
  std::vector<DeviceInfo> infos(rank.size());
  rank.all_gather(&mine, infos.data(), sizeof mine);
  // Granularities are powers of two, so a multiple of the largest is a multiple of all.
  std::int64_t granularity = 1;
  for (const DeviceInfo& info : infos) {
    granularity = std::max(granularity, info.granularity);
    ranks_on_my_device_ += same(info.uuid, mine.uuid);
  }
  mapped_bytes_ = round_up(bytes_, granularity);
  run_on_all_ranks(rank, [&] {
    for (int peer = 0; peer < rank.size(); ++peer) devices_[peer] = find_device(infos[peer].uuid);
    check_access(infos);
  });
}

// Access to a device that is not visible in this process cannot be queried; importing its memory fails later
// if there is none.
void DeviceSymmetricMemory::check_access(const std::vector<DeviceInfo>& infos) const {
  const int mine = devices_[rank_];
  for (std::size_t peer = 0; peer < infos.size(); ++peer) {
    if (devices_[peer] < 0 || devices_[peer] == mine) continue;
    int accessible = 0;
    check(cudaDeviceCanAccessPeer(&accessible, mine, devices_[peer]), "query peer access");
    if (accessible != 0) continue;
    throw UnsupportedError(str("device ", mine, " of rank ", rank_, " cannot access the memory of device ",
                               infos[peer].device, " of rank ", peer));
  }
}

std::array<std::byte, 16> id_of_current_device() {
  const CUuuid uuid = uuid_of(initialise_device());
  std::array<std::byte, 16> id{};
  static_assert(sizeof uuid == sizeof id);
  std::memcpy(id.data(), &uuid, sizeof uuid);
  return id;
}

int ranks_on_current_device(const Rank& rank) {
  std::array<std::byte, 16> mine{};
  run_on_all_ranks(rank, [&] { mine = id_of_current_device(); });
  std::vector<std::array<std::byte, 16>> all(static_cast<std::size_t>(rank.size()));
  rank.all_gather(&mine, all.data(), sizeof mine);
  return static_cast<int>(std::count(all.begin(), all.end(), mine));
}

void DeviceSymmetricMemory::share_with_threads(const Rank& rank) {
  run_on_all_ranks(rank, [&] {
    const auto memory = Allocation::on_device(devices_[rank_], mapped_bytes_, false);
    std::vector<int> all = devices_;
    std::sort(all.begin(), all.end());
    all.erase(std::unique(all.begin(), all.end()), all.end());
    regions_[rank_] = std::make_shared<DeviceMapping>(memory, mapped_bytes_, all);
    zero(regions_[rank_]->data(), mapped_bytes_);
  });
  const PublishedHandle handle(regions_[rank_]);
  const DeviceMapping* mine = handle.address();
  std::vector<const DeviceMapping*> all(rank.size());
  rank.all_gather(&mine, all.data(), sizeof mine);
  run_on_all_ranks(rank, [&] {
    for (int peer = 0; peer < rank.size(); ++peer) {
      regions_[peer] = PublishedHandle<DeviceMapping>::take(all[peer]);
      if (!regions_[peer]) throw UsageError(str("rank ", peer, " no longer has its symmetric memory"));
    }
  });
}

void DeviceSymmetricMemory::share_with_processes(const Rank& rank) {
  const std::span<const int> my_device(&devices_[rank_], 1);
  FileDescriptor mine;
  run_on_all_ranks(rank, [&] {
    const auto memory = Allocation::on_device(devices_[rank_], mapped_bytes_, true);
    regions_[rank_] = std::make_shared<DeviceMapping>(memory, mapped_bytes_, my_device);
    zero(regions_[rank_]->data(), mapped_bytes_);
    mine = memory.export_descriptor();
  });
  const std::vector<FileDescriptor> all = exchange_descriptors(rank, mine);
  run_on_all_ranks(rank, [&] {
    for (int peer = 0; peer < rank.size(); ++peer) {
      if (peer == rank_) continue;
      regions_[peer] =
          std::make_shared<DeviceMapping>(Allocation::import_from(peer, all[peer]), mapped_bytes_, my_device);
    }
  });
}

}  // namespace ferry::cuda
