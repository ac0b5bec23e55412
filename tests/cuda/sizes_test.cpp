// The size query and the device memory that an exchange allocates.
#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "cuda/device_test.hpp"

namespace ferry::contract {
namespace {

using CudaSizeQuery = DeviceTest;

constexpr std::int64_t kAllocationUnit = 2 << 20;  // device memory is allocated in multiples of it

std::int64_t symmetric_bytes(const Sizes& sizes) {
  return sizes.dispatch_staging + sizes.combine_staging + sizes.signals + sizes.results;
}

std::int64_t unused_in_last_unit(const Sizes& sizes) {
  const std::int64_t bytes = symmetric_bytes(sizes);
  return (bytes + kAllocationUnit - 1) / kAllocationUnit * kAllocationUnit - bytes;
}

// A configuration whose symmetric memory, one allocation, nearly fills its last granule, so that what is
// allocated differs little from what is needed.
Config full_granules(Config config, int ranks) {
  while (unused_in_last_unit(size_of(config, ranks)) > kAllocationUnit / 8) ++config.max_tokens;
  return config;
}

int current_device() {
  int device = 0;
  require_success(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

// Ranks may share a device: it then holds the memory of all of them.
TEST_F(CudaSizeQuery, MatchesTheAllocatedMemoryOfEveryRank) {
  for (const int ranks : {1, 2, 4}) {
    for (const Layout layout : {Layout::expert_major, Layout::expert_padded, Layout::rank_major}) {
      TestCase c = device_case(static_cast<std::uint64_t>(ranks), ranks);
      c.config.layout = layout;
      c.config.hidden = 2048;
      c.config.max_tokens = 512;
      c.config = full_granules(c.config, ranks);
      std::vector<int> devices(static_cast<std::size_t>(ranks));
      run(ranks, c, [&](Rank rank) {
        devices[static_cast<std::size_t>(rank.index())] = current_device();
        {
          const ferry::Exchange first(rank, c.config);  // allocates more: the driver and the kernels
          rank.barrier();
        }
        rank.barrier();
        const std::int64_t before = device::memory_in_use();
        rank.barrier();
        const ferry::Exchange exchange(rank, c.config);
        rank.barrier();
        const std::int64_t grown = device::memory_in_use() - before;
        rank.barrier();
        const int sharing = static_cast<int>(std::count(devices.begin(), devices.end(), current_device()));
        std::int64_t expected = 0;  // symmetric memory in whole units
        for (int other = 0; other < ranks; ++other)
          if (devices[static_cast<std::size_t>(other)] == current_device()) {
            const Sizes sizes = size_of(c.config, ranks, other);
            expected += sizes.total() + unused_in_last_unit(sizes);
          }
        require_equal(exchange.sizes().total(), size_of(c.config, ranks, rank.index()).total(),
                      "Exchange::sizes");
        require(expected > 5 * kAllocationUnit * sharing, "too few bytes to compare: ", expected);
        require(std::abs(grown - expected) <= kAllocationUnit * sharing, "allocated ", grown, " bytes for ",
                sharing, " ranks on the device, the query says ", expected);
      });
    }
  }
}

}  // namespace
}  // namespace ferry::contract
