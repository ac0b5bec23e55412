// The transfers through shared memory that carry two hops of the backend `cpu`.
#include "backends/collective/window_communicator.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>

#include "ferry/ferry.hpp"
#include "runtime/support.hpp"

namespace ferry::collective {
namespace {

constexpr std::int64_t kBytes = 300;

// Sends kBytes to the other of two ranks, and receives as many.
void swap(WindowCommunicator& communicator, int me, const std::function<void()>& check) {
  const auto to_peer = [me](std::int64_t value) {
    return me == 0 ? std::array<std::int64_t, 2>{0, value} : std::array<std::int64_t, 2>{value, 0};
  };
  std::array<std::byte, kBytes> sent, received{};
  sent.fill(static_cast<std::byte>(me + 1));
  const auto bytes = to_peer(kBytes), offsets = to_peer(0);
  communicator.all_to_all_v({.send = sent.data(),
                             .send_bytes = bytes,
                             .send_offsets = offsets,
                             .receive = received.data(),
                             .receive_bytes = bytes,
                             .receive_offsets = offsets},
                            nullptr, check);
  for (const std::byte byte : received)
    FERRY_CHECK(byte == static_cast<std::byte>(2 - me), "a byte of the peer");
}

// A peer that has sent its bytes, and received its own, may find a failure before this rank has taken them.
TEST(WindowCommunicator, AFailureLeavesWhatHasArrived) {
  Group::threads(2).run([](const Rank& rank) {
    const WindowLayout layout{.ranks = 2, .lanes = 1, .window_bytes = 512};
    const auto memory = std::make_shared<const SymmetricMemory>(rank, layout.bytes());
    WindowCommunicator communicator(rank, memory, layout, 0);
    if (rank.index() == 1) {
      rank.barrier();  // rank 0 is in its first check
      swap(communicator, 1, [] {});
      rank.barrier();
      return;
    }
    bool checked = false;
    swap(communicator, 0, [&] {
      if (checked) return;
      checked = true;
      rank.barrier();
      rank.barrier();  // the peer has finished the transfer
      throw std::runtime_error("the group has failed");
    });
    FERRY_CHECK(checked, "rank 0 has waited");
  });
}

TEST(WindowCommunicator, AFailureEndsAWait) {
  Group::threads(2).run([](const Rank& rank) {
    const WindowLayout layout{.ranks = 2, .lanes = 1, .window_bytes = 64};
    const auto memory = std::make_shared<const SymmetricMemory>(rank, layout.bytes());
    WindowCommunicator communicator(rank, memory, layout, 0);
    if (rank.index() == 0) {
      EXPECT_THROW(swap(communicator, 0, [] { throw std::runtime_error("the group has failed"); }),
                   std::runtime_error);
    }
    rank.barrier();
  });
}

// Positions that no peer can have written.
TEST(WindowCommunicator, DamagedPositionsEndTheTransfer) {
  for (const std::int64_t word : {0, 64}) {  // of a pair: written, read
    for (const std::uint64_t value : {std::uint64_t{513}, std::uint64_t{1} << 40, std::uint64_t{1} << 63}) {
      Group::threads(2).run([&](const Rank& rank) {
        const WindowLayout layout{.ranks = 2, .lanes = 1, .window_bytes = 512};
        const auto memory = std::make_shared<const SymmetricMemory>(rank, layout.bytes());
        WindowCommunicator communicator(rank, memory, layout, 0);
        if (rank.index() == 0) {
          std::memcpy(memory->at(0, WindowLayout::kPairBytes + word), &value, sizeof value);
          EXPECT_THROW(swap(communicator, 0, [] { throw std::runtime_error("nobody has noticed"); }),
                       SystemError)
              << word << ", " << value;
        }
        rank.barrier();
      });
    }
  }
}

}  // namespace
}  // namespace ferry::collective
