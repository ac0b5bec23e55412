// Symmetric device memory: writes to a peer are seen there, and memory stays mapped while any rank uses it.
#include "backends/cuda/memory/symmetric.hpp"

#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <filesystem>
#include <optional>
#include <thread>
#include <vector>

#include "backends/cuda/memory/device_memory.hpp"
#include "backends/cuda/runtime/error.hpp"
#include "cuda/memory/devices.hpp"
#include "cuda/memory/kernels.hpp"
#include "group/rank_state.hpp"
#include "runtime/channel_support.hpp"
#include "runtime/support.hpp"

namespace ferry::test {
namespace {

using cuda::DeviceSymmetricMemory;
using cuda::PinnedMemory;

enum class Devices { one, all };

// Sets the current device of a rank's thread or process.
void set_device(Devices devices, const Rank& rank) {
  int count = 0;
  cuda::check(cudaGetDeviceCount(&count), "count the devices");
  cuda::check(cudaSetDevice(devices == Devices::one ? 0 : rank.index() % count), "set the device");
}

struct Parameter {
  GroupKind kind;
  Devices devices;
};

std::vector<Parameter> parameters() {
  std::vector<Parameter> all;
  for (const GroupKind kind : kGroupKinds) {
    for (const Devices devices : {Devices::one, Devices::all}) all.push_back({kind, devices});
  }
  return all;
}

class DeviceSymmetric : public testing::TestWithParam<Parameter> {
 protected:
  void SetUp() override { FERRY_SKIP_WITHOUT_DEVICES(GetParam().devices == Devices::one ? 1 : 2); }

  void run(int ranks, const std::function<void(Rank)>& body) {
    run_ranks(GetParam().kind, ranks, kNoFaultDeadline, [&](const Rank& rank) {
      set_device(GetParam().devices, rank);
      body(rank);
    });
  }
};
INSTANTIATE_TEST_SUITE_P(Kinds, DeviceSymmetric, testing::ValuesIn(parameters()), [](const auto& test) {
  return name(test.param.kind) + (test.param.devices == Devices::one ? "_on_one_device" : "_on_all_devices");
});

constexpr std::int64_t kPartWords = 100003;
constexpr std::int64_t kPartBytes = 4 * kPartWords;

std::uint64_t key(int from, int to) {
  return seed() * 1009 + static_cast<std::uint64_t>(64 * from + to);
}

std::uint32_t* words_at(const DeviceSymmetricMemory& memory, int rank, int part) {
  return reinterpret_cast<std::uint32_t*>(memory.at(rank, part * kPartBytes));
}

// Every rank fills its part of every rank's memory, by a kernel or by a copy.
void write_to_all(const Rank& rank, const DeviceSymmetricMemory& memory) {
  const TestStream stream;
  for (int peer = 0; peer < rank.size(); ++peer) {
    std::uint32_t* words = words_at(memory, peer, rank.index());
    const std::uint64_t mine = key(rank.index(), peer);
    if ((rank.index() + peer) % 2 == 0) {
      start_fill(stream.get(), words, kPartWords, mine);
    } else {
      std::vector<std::uint32_t> values(kPartWords);
      for (std::int64_t i = 0; i < kPartWords; ++i) values[i] = pattern(mine, i);
      copy_bytes(words, values.data(), kPartBytes);
    }
  }
  stream.synchronize();
}

void check_part(const DeviceSymmetricMemory& memory, int at, int from) {
  std::vector<std::uint32_t> read(kPartWords);
  copy_bytes(read.data(), words_at(memory, at, from), kPartBytes);
  for (std::int64_t i = 0; i < kPartWords; ++i) {
    FERRY_CHECK(read[i] == pattern(key(from, at), i), str("word ", i, " of rank ", from, " on rank ", at));
  }
}

void check_zero(const DeviceSymmetricMemory& memory) {
  std::vector<std::byte> read(memory.bytes(), std::byte{0xA5});
  copy_bytes(read.data(), memory.mine(0), read.size());
  for (std::size_t i = 0; i < read.size(); ++i) FERRY_CHECK(read[i] == std::byte{0}, str("byte ", i));
}

void check_exchange(const Rank& rank) {
  const DeviceSymmetricMemory memory(rank, rank.size() * kPartBytes);
  check_zero(memory);
  rank.barrier();
  write_to_all(rank, memory);
  rank.barrier();
  for (int peer = 0; peer < rank.size(); ++peer) check_part(memory, rank.index(), peer);
  rank.barrier();
}

TEST_P(DeviceSymmetric, StartsZeroedAndPeersSeeWrites) {
  for (const int ranks : {1, 2, 4, 8}) {
    run(ranks, [](const Rank& rank) {
      // The second memory must not contain what the first left on the device.
      check_exchange(rank);
      check_exchange(rank);
    });
  }
}

TEST_P(DeviceSymmetric, ReportsTheDevicesOfAllRanks) {
  run(4, [&](const Rank& rank) {
    const DeviceSymmetricMemory memory(rank, 1000);
    FERRY_CHECK(memory.bytes() == 1000, str(memory.bytes()));
    FERRY_CHECK(memory.mapped_bytes() >= 1000 && memory.mapped_bytes() % 4096 == 0,
                str(memory.mapped_bytes()));
    int count = 0;
    cuda::check(cudaGetDeviceCount(&count), "count the devices");
    const int used = GetParam().devices == Devices::one ? 1 : count;
    int on_mine = 0;
    for (int peer = 0; peer < rank.size(); ++peer) {
      FERRY_CHECK(memory.device_of(peer) == peer % used, str("rank ", peer, ": ", memory.device_of(peer)));
      on_mine += peer % used == rank.index() % used;
    }
    FERRY_CHECK(memory.ranks_on_my_device() == on_mine, str(memory.ranks_on_my_device()));
  });
}

TEST_P(DeviceSymmetric, DifferentSizesAreRefused) {
  run(3, [](const Rank& rank) {
    const auto error =
        expect_thrown<UsageError>([&] { DeviceSymmetricMemory(rank, rank.index() == 1 ? 128 : 64); });
    require_text(error, "rank 0 asks for 64 bytes, rank 1 for 128");
    check_exchange(rank);
  });
}

TEST_P(DeviceSymmetric, FailedAllocationThrowsOnAllRanks) {
  run(3, [](const Rank& rank) {
    const auto error =
        expect_thrown<SystemError>([&] { DeviceSymmetricMemory(rank, std::int64_t{1} << 50); });
    require_text(error, "rank 0: cannot allocate ");
    check_exchange(rank);
  });
}

TEST_P(DeviceSymmetric, StaysMappedInPeersAfterItsOwnerLeaves) {
  run(3, [](const Rank& rank) {
    const DeviceSymmetricMemory memory(rank, 3 * kPartBytes);
    if (rank.index() == 0) return;
    sleep_seconds(0.5);
    write_to_all(rank, memory);
    check_part(memory, 0, rank.index());
  });
}

TEST_P(DeviceSymmetric, IsFreedOnDestruction) {
  run(2, [](const Rank& rank) {
    namespace fs = std::filesystem;
    const auto free_bytes = [] {
      std::size_t free = 0, total = 0;
      cuda::check(cudaMemGetInfo(&free, &total), "ask for free memory");
      return static_cast<std::int64_t>(free);
    };
    const auto files = [] {
      return std::distance(fs::directory_iterator("/proc/self/fd"), fs::directory_iterator());
    };
    constexpr std::int64_t kBytes = std::int64_t{64} << 20;
    for (int i = 0; i < 5; ++i) DeviceSymmetricMemory(rank, kBytes);
    rank.barrier();
    const std::int64_t free_before = free_bytes();
    const auto files_before = files();
    rank.barrier();
    for (int i = 0; i < 40; ++i) DeviceSymmetricMemory(rank, kBytes);
    rank.barrier();
    FERRY_CHECK(free_bytes() >= free_before - 4 * kBytes,
                str(free_before, " bytes free before, then ", free_bytes()));
    FERRY_CHECK(files() <= files_before + 8, str(files_before, " files before, then ", files()));
    rank.barrier();
  });
}

// A kernel of this rank that accesses a peer's memory until end().
class PeerAccess {
 public:
  PeerAccess() : control_(64) {}

  // Call it once all ranks have constructed theirs: allocating pinned memory may wait for running kernels.
  void start(std::byte* target) {
    start_peer_access(stream_.get(), reinterpret_cast<std::uint32_t*>(target), stop(), rounds());
  }

  void check_running() const {
    FERRY_CHECK(cudaStreamQuery(stream_.get()) == cudaErrorNotReady, "the kernel ended too early");
    cudaGetLastError();  // clears the "not ready" status
  }

  void end() {
    std::atomic_ref(*stop()).store(1, std::memory_order_release);
    stream_.synchronize();
    FERRY_CHECK(*rounds() > 0, "the kernel did nothing");
  }

 private:
  std::uint32_t* stop() const { return reinterpret_cast<std::uint32_t*>(control_.data()); }
  std::uint64_t* rounds() const { return reinterpret_cast<std::uint64_t*>(control_.data() + 8); }

  PinnedMemory control_;
  TestStream stream_;
};

TEST_P(DeviceSymmetric, StaysMappedUnderARunningKernelOfAPeer) {
  run(3, [](const Rank& rank) {
    std::optional<DeviceSymmetricMemory> memory(std::in_place, rank, 3 * kPartBytes);
    PeerAccess access;
    rank.barrier();
    if (rank.index() != 0) access.start(memory->at(0, rank.index() * kPartBytes));
    rank.barrier();
    if (rank.index() == 0) memory.reset();
    rank.barrier();
    if (rank.index() == 0) return;
    sleep_seconds(0.3);
    access.check_running();
    access.end();
    write_to_all(rank, *memory);
    check_part(*memory, 0, rank.index());
  });
}

#ifdef FERRY_TEST_PROCESSES

// When a rank is killed, the rank before it accesses its memory, and it accesses the memory of the rank after
// it.
TEST_P(DeviceSymmetric, StaysUsableWhenAPeerIsKilled) {
  constexpr int kRanks = 4;
  Random random(seed());
  const int victim = below(random, kRanks);
  const TestBootstrap survivors(kRanks - 1);
  SharedValue<std::atomic<int>> done;
  const auto body = [&](const Rank& rank) {
    {
      const DeviceSymmetricMemory memory(rank, kRanks * kPartBytes);
      PeerAccess access;
      rank.barrier();
      access.start(memory.at((rank.index() + 1) % kRanks, rank.index() * kPartBytes));
      sleep_seconds(0.2);
      if (rank.index() == victim) raise(SIGKILL);
      const Stopwatch watch;
      const auto error = expect_thrown<PeerLostError>([&] { rank.barrier(); });
      FERRY_CHECK(error.record.peer == victim && watch.seconds() < 1.0,
                  str(error.what(), ", ", watch.seconds()));
      sleep_seconds(1.0);
      access.check_running();
      access.end();
      // Kernels launched after the death still write to all memory, the dead rank's included.
      write_to_all(rank, memory);
      check_part(memory, victim, rank.index());
      check_part(memory, rank.index(), rank.index());
    }
    const int mine = rank.index() > victim ? rank.index() - 1 : rank.index();
    Group::custom(survivors.bootstrap(mine)).run([](const Rank& survivor) { check_exchange(survivor); });
    ++*done;
  };
  EXPECT_ANY_THROW(run(kRanks, body)) << "victim " << victim;
  EXPECT_EQ(*done, kRanks - 1) << "victim " << victim;
}

TEST_P(DeviceSymmetric, ConstructionThrowsOnAllRanksWhenOneIsKilled) {
  Random random(seed());
  for (int round = 0; round < 5; ++round) {
    const int victim = below(random, 3);
    const double seconds = 0.3 * below(random, 1000) / 1000;
    SharedValue<std::atomic<int>> done;
    const Stopwatch watch;
    EXPECT_ANY_THROW(run(3, [&](const Rank& rank) {
      cuda::check(cudaFree(nullptr), "start CUDA");
      rank.barrier();
      std::jthread killer;
      if (rank.index() == victim) {
        killer = std::jthread([&] {
          sleep_seconds(seconds);
          raise(SIGKILL);
        });
      }
      expect_thrown<PeerLostError>([&] {
        while (true) DeviceSymmetricMemory(rank, 1 << 20);
      });
      ++*done;
    }));
    EXPECT_EQ(*done, 2) << "victim " << victim << " after " << seconds << " s";
  }
}

#endif

}  // namespace
}  // namespace ferry::test
