// Messages through windows between ranks over NVSHMEM's heap: the check of the transport, run by one rank.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backends/cuda/memory/device_memory.hpp"
#include "backends/cuda/runtime/error.hpp"
#include "backends/nvshmem/session.hpp"
#include "cuda/memory/devices.hpp"
#include "group/control_block.hpp"
#include "runtime/support.hpp"

namespace ferry::test {

using cuda::DeviceMemory;
using cuda::MessageCheck;
using cuda::PinnedMemory;
using nvshmem::HeapMemory;
using nvshmem::Peers;
using nvshmem::Session;

struct Found {
  unsigned long long wrong;
  unsigned ended;
  float milliseconds;
};

// Memory of one rank for checks of one layout.
class Checks {
 public:
  Checks(const Rank& rank, Session& session, const cuda::MessageCheckLayout& layout)
      : rank_(rank),
        session_(session),
        layout_(layout),
        heap_(session.allocate(layout.total())),
        state_(sizeof(cuda::LaneState)),
        pes_(4 * rank.size()),
        found_(16 + sizeof(cuda::Epoch)),
        report_(sizeof(cuda::HostSignals)) {
    copy_bytes(pes_.data(), session.pes().data(), static_cast<std::size_t>(pes_.bytes()));
  }

  const HeapMemory& heap() const { return heap_; }
  const cuda::HostSignals& report() const { return *reinterpret_cast<cuda::HostSignals*>(report_.data()); }

  // `remote`: whether a rank is reached by puts. Collective unless a test leaves a rank out.
  template <class Remote>
  Found run(std::int64_t messages, bool compare, int blocks, double deadline, Remote remote) {
    MessageCheck check{};
    check.lane.rank = rank_.index();
    check.lane.ranks = rank_.size();
    check.lane.deadline = static_cast<std::uint64_t>(deadline * 1e9);
    for (int r = 0; r < rank_.size(); ++r)
      check.lane.symmetric[r] = r == rank_.index() ? heap_.data() : heap_.mapped(r);
    check.lane.state = reinterpret_cast<cuda::LaneState*>(state_.data());
    check.lane.epoch = reinterpret_cast<const cuda::Epoch*>(found_.data() + 16);
    check.lane.timeout_claimed = reinterpret_cast<unsigned*>(found_.data() + 12);
    check.lane.report = reinterpret_cast<cuda::HostSignals*>(report_.data());
    check.layout = layout_;
    check.messages = messages;
    check.first = first_;
    check.call = ++call_;
    check.compare = compare;
    check.wrong = reinterpret_cast<unsigned long long*>(found_.data());
    check.ended = reinterpret_cast<unsigned*>(found_.data() + 8);
    first_ += static_cast<std::uint64_t>(messages);
    Peers peers{};
    peers.pes = reinterpret_cast<const std::int32_t*>(pes_.data());
    for (int r = 0; r < rank_.size(); ++r) {
      if (r != rank_.index() && remote(r)) peers.remote.add(r);
    }
    cuda::zero(found_.data(), found_.bytes());
    const cuda::Epoch epoch{.number = kFirstEpoch, .row_order_hash = 0, .placement_version = 0};
    copy_bytes(found_.data() + 16, &epoch, sizeof epoch);
    rank_.barrier();
    const TestStream stream;
    cudaEvent_t begun{}, done{};
    cuda::check(cudaEventCreate(&begun), "make an event");
    cuda::check(cudaEventCreate(&done), "make an event");
    cuda::check(cudaEventRecord(begun, static_cast<cudaStream_t>(stream.get())), "record an event");
    FERRY_CHECK(session_.module().check_messages(check, peers, blocks, stream.get()) == 0, "launch");
    cuda::check(cudaEventRecord(done, static_cast<cudaStream_t>(stream.get())), "record an event");
    stream.synchronize();
    Found found{};
    copy_bytes(&found, found_.data(), 12);
    cuda::check(cudaEventElapsedTime(&found.milliseconds, begun, done), "read the time");
    cudaEventDestroy(begun);
    cudaEventDestroy(done);
    return found;
  }

 private:
  Rank rank_;
  Session& session_;
  cuda::MessageCheckLayout layout_;
  HeapMemory heap_;
  DeviceMemory state_, pes_, found_;
  PinnedMemory report_;
  std::uint64_t first_ = 0, call_ = 0;
};

// Blocks of 8 warps that hold all warps of a check.
inline int blocks_of(const cuda::MessageCheckLayout& layout) {
  return (2 * (layout.ranks - 1) * layout.channels + 7) / 8;
}

}  // namespace ferry::test
