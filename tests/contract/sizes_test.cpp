// The size query: agreement with the memory that is mapped, and the bound on symmetric memory.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>

#include <malloc.h>
#include <unistd.h>

#include "harness/device.hpp"
#include "harness/harness.hpp"

namespace ferry::contract {
namespace {

std::int64_t mapped_bytes(bool on_device) {
  if (on_device) return device::memory_in_use();
  malloc_trim(0);  // what earlier tests have freed; otherwise a later free() may unmap it
  std::int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * sysconf(_SC_PAGESIZE);
}

// Bytes that this process maps when all ranks construct an exchange: all memory of its own ranks, and the
// symmetric memory of ranks in other processes.
std::int64_t expected_bytes(const Config& config, const Rank& rank) {
  std::int64_t bytes = 0;
  for (int r = 0; r < rank.size(); ++r) {
    const Sizes sizes = size_of(config, rank.topology(), r);
    const std::int64_t symmetric = sizes.dispatch_staging + sizes.combine_staging + sizes.signals;
    bytes += rank.same_process() || r == rank.index() ? sizes.total() : symmetric;
  }
  return bytes;
}

TEST_P(Contract, SizeQueryMatchesMappedMemory) {
  const bool on_device = GetParam().on_device();
  for (const int ranks : {1, 2, 4, 8}) {
    if (on_device && ranks > 1) continue;  // ranks of a process may share a device
    for (const Layout layout : {Layout::expert_major, Layout::expert_padded, Layout::rank_major}) {
      TestCase c = small_case(1);
      // Device memory is allocated in multiples of 2 MiB, several times per exchange.
      const std::int64_t tolerance = (on_device ? 16LL : 2LL) << 20;
      c.ranks = ranks;
      c.config.layout = layout;
      c.config.max_tokens = on_device ? 4096 : 256 / ranks;
      c.config.hidden = 2048;
      c.config.top_k = 4;
      c.config.lanes = 2;
      run(ranks, describe(c), [&](Rank rank) {
        const Sizes query = size_of(c.config, rank.topology(), rank.index());
        require(query.total() > 2 * tolerance, "too few bytes to compare: ", query.total());
        if (on_device)
          SyncExchange(rank, c.config);  // the first exchange of a process allocates more: driver and module
        rank.barrier();
        const std::int64_t before = mapped_bytes(on_device);
        rank.barrier();
        const SyncExchange exchange(rank, c.config);
        rank.barrier();
        const std::int64_t grown = mapped_bytes(on_device) - before;
        rank.barrier();
        require_equal(exchange.sizes().total(), query.total(), "Exchange::sizes");
        require_equal(exchange.capacity(), capacity_of(c.config, ranks, rank.index()), "capacity");
        // Engines map memory of their own.
        if (c.config.backend == BackendKind::collective && !on_device) return;
        const std::int64_t expected = expected_bytes(c.config, rank);
        require(std::abs(grown - expected) <= tolerance, "mapped ", grown, " bytes, the query says ",
                expected);
      });
    }
  }
}

TEST(Sizes, SymmetricMemoryStaysWithinItsBound) {
  std::vector<BackendKind> backends = {BackendKind::cpu};
  if (device::is_built()) backends.push_back(BackendKind::cuda);
  for (const BackendKind backend : backends) {
    for (const Reduction reduction : {Reduction::partial, Reduction::exact}) {
      const int ranks = 8;
      Config config{.experts = 256, .top_k = 8, .hidden = 7168, .max_tokens = 4096, .backend = backend};
      config.reduction = reduction;
      const Sizes sizes = size_of(config, ranks, 3);
      const double staging_rows = 4096.0 * 8;  // T*K, and T*min(K, R)
      const double bound = 2 * (ranks * 4096.0 * 7168 * 2 + staging_rows * 7168 * 2);
      const auto symmetric =
          static_cast<double>(sizes.dispatch_staging + sizes.combine_staging + sizes.signals);
      EXPECT_LE(symmetric, 1.05 * bound) << to_string(backend);
      EXPECT_GE(symmetric, bound) << to_string(backend);
      if (backend != BackendKind::cpu) continue;
      const double rows = static_cast<double>(capacity_of(config, ranks, 3)) * 7168 * 2;
      EXPECT_NEAR(static_cast<double>(sizes.results), rows, 0.05 * rows);
    }
  }
}

}  // namespace
}  // namespace ferry::contract
