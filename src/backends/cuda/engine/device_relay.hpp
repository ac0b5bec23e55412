// What kernels do for two hops over an engine, between device memory of the ranks: they make a bundle for
// each other node out of the messages to the experts (operations/bundles.hpp), and messages out of bundles;
// and they add the rows of a combine by node.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "backends/collective/message_hops.hpp"
#include "backends/cpu/link/peer_link.hpp"
#include "backends/cuda/combine/packed_rows.hpp"
#include "backends/cuda/operations/bundles.hpp"

namespace ferry::cuda {

inline std::size_t at(int rank) {
  return static_cast<std::size_t>(rank);
}

class DeviceRelay final : public cpu::Forwarder {
 public:
  // Writes the sums of rows for one source rank to `out`, and their number to `count` when the stream has
  // executed it.
  using AddRows = std::function<void(std::span<const ArrivedRows> rows, std::byte* out, std::int32_t* count)>;

  struct Setup {
    const Topology& topology;
    int rank, device;
    std::int32_t max_tokens;
    collective::HopMemory& hops;
    cudaStream_t stream;       // of `hops`
    std::int32_t* payload_of;  // see NumberPayloadsArguments
    std::int32_t* counts;      // [R] in pinned memory, which kernels write
    AddRows add_rows;
  };
  explicit DeviceRelay(const Setup& setup) : setup_(setup), node_(setup.topology.node_of(setup.rank)) {}

  // The kind of messages that a call has.
  struct Kind {
    bool rows;  // packed rows, to the tokens' source ranks; otherwise messages, to the experts
    // Messages:
    BundleSizes sizes;
    const std::int32_t* sent_tokens;  // [R, T] of the plan, in device memory
    // Rows:
    bool adds;  // by node
  };
  // Packs messages that go straight to their ranks for two hops, and waits for that.
  void pack(const Kind& kind, collective::SentMessages* sent);

  std::vector<cpu::ForwardedMessages> plan(std::span<const cpu::HeldMessages> held) override;
  void write(std::span<cpu::ForwardedMessages> forwards) override;

 private:
  void pack_bundles(collective::SentMessages* sent);
  void pack_rows(collective::SentMessages* sent) const;
  void open_bundles(std::span<const cpu::ForwardedMessages> forwards) const;
  void add_rows(std::span<cpu::ForwardedMessages> forwards) const;

  const Setup setup_;
  const int node_;

  // The current call.
  Kind kind_{};
  std::int64_t message_bytes_ = 0, most_bytes_ = 0;  // of one message, of those from one rank to another
  std::vector<cpu::HeldMessages> held_;
};

}  // namespace ferry::cuda
