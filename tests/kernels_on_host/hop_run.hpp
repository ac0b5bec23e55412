// Ranks whose launches between the phases of calls in two hops run on the host. Every call is compared with
// what it should deliver.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "backends/cuda/combine/combine.hpp"
#include "backends/cuda/two_hops/hop_block.cuh"
#include "group/control_block.hpp"
#include "kernels_on_host/grid.hpp"
#include "kernels_on_host/network.hpp"
#include "oracle/gather.hpp"

namespace ferry::cuda {

// Some ranks and their lanes, on which calls follow one another.
class HopRun {
 public:
  static constexpr int kTopK = 3, kExperts = 4, kHidden = 40;
  static constexpr std::int32_t kTokens = 24;  // most of a rank

  HopRun(std::uint64_t seed, const std::vector<int>& labels, int window, int channels,
         std::uint64_t deadline = ~0ull);

  // Messages of a dispatch with random destinations. `by_plan`: counts come from a plan.
  void messages(bool by_plan = false);

  // Rows of a combine, each for a random (source rank, token, position). `adds`: by node. `continues`: in a
  // second launch of the call before.
  void rows(bool adds, bool continues = false);

  // A call that one rank refuses, or in which ranks differ. Nothing is moved.
  void refused(int by, bool differs);
  // A second launch of that call, in which the ranks would agree. Nothing is moved either.
  void continue_refused();

  // One hop: messages to other nodes pass no relay.
  void send_straight();

  // Delays puts between nodes, and reorders them as a network may.
  void make_puts_late(PutMistake mistake = PutMistake::none);

  // Runs a dispatch in which rank `absent` does not take part.
  std::map<int, WaitRecord> run_without(int absent);

  // Runs a dispatch in which rank `stopped` stops when it has exchanged call headers.
  std::map<int, WaitRecord> run_stopped(int stopped);

  // The same, and then the hosts of all ranks abort it. Expects that the launches end with an empty result.
  void run_aborted(int stopped);
  std::map<int, WaitRecord> records() const;

  const HopCounts& counted(int rank, int kind) const { return rank_[at(rank)].counts[kind]; }

 private:
  static constexpr std::int64_t kRows = kTokens * kTopK;
  static constexpr std::int64_t kPayload = 1040, kMetadata = kTopK * sizeof(LLPacket),
                                kMessage = kPayload + kMetadata;

  static std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

  struct alignas(16) Line {
    std::byte bytes[16];
  };
  // Memory aligned to 16 bytes.
  struct Memory {
    std::vector<Line> lines;

    std::byte* reserve(std::int64_t bytes) {
      lines.assign(at((bytes + 15) / 16), Line{});
      return data();
    }
    std::byte* data() { return reinterpret_cast<std::byte*>(lines.data()); }
  };

  struct Rank {
    Memory windows, inbox, outbox, row_outbox, row_inbox;
    std::vector<HopTaskState> states;
    std::vector<std::int32_t> sent_tokens, plan_counts;
    std::vector<LLPacket> arrived;
    HopCounts counts[4] = {};
    std::uint32_t agreed = 7;
    std::vector<std::int32_t> result_counts, result_offsets;
    LLPacket totals{};
    LaneState state{};
    Epoch epoch{.number = kFirstEpoch, .row_order_hash = 0, .placement_version = 0};
    unsigned timeout_claimed = 0;
    HostSignals report{};
    DeviceError error{};
    HopArguments call{};
  };

  void begin(HopContent content, Operation operation, bool continues = false);
  void begin_stopped(int stopped);

  std::vector<std::byte> payload_of(int source, int token) const;
  std::array<LLPacket, kTopK> metadata_of(int source, int rank, int token) const;
  void store_message(std::byte* block, int s, int d, int token, std::int32_t i) const;

  // As the launch of a send phase: to others in the outbox, to itself in the inbox.
  void post_header(int s, const std::vector<std::int32_t>& counts);

  void run(int absent = -1);
  template <class Transport>
  void launch(on_host::Grid& grid, int r, unsigned blocks, const Transport& transport, unsigned& running) {
    const auto states = std::make_shared<std::deque<HopState>>(blocks);
    const HopArguments* call = &rank_[at(r)].call;
    grid.add(blocks, static_cast<unsigned>(call->threads),
             [call, states, transport, &running](unsigned block) {
               HopBlock<Transport>(*call, transport, &(*states)[block]).run();
               --running;
             });
  }

  void expect_messages(int s, int d, const std::vector<std::set<int>>& to);

  void expect_wire(const std::vector<std::vector<std::set<int>>>& to);

  oracle::Bytes random_row(std::int64_t index);
  oracle::Bytes sum_of(const std::vector<oracle::Bytes>& rows) const;

  std::mt19937_64 random_;
  const Topology topology_;
  const int ranks_;
  DeviceSignals signals_;
  HopLayout layout_;
  CombineRowLayout row_;
  std::int64_t header_bytes_, flags_, block_bytes_, row_bytes_;
  std::deque<Rank> rank_;
  std::vector<std::byte*> sections_;  // of symmetric memory
  std::uint64_t number_ = 0;
  bool late_ = false, straight_ = false, hosts_abort_ = false;
  PutMistake mistake_ = PutMistake::none;
  Network network_{random_()};
  static constexpr int most_blocks_ = 3;
};

}  // namespace ferry::cuda
