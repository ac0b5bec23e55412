// A kernel's view of its lane: plain values and addresses, passed by value. And how many ranks the kernels of
// a translation unit serve.
//
// In the kernels of most calls a rank is a thread of a warp, or a bit of a word. Such narrow kernels serve
// groups of up to kNarrowRanks ranks. Wide kernels serve groups of any size: they come from the same sources,
// in translation units that define FERRY_WIDE_KERNELS before they include anything, and loop over ranks where
// narrow ones have a thread for each. Operations whose time does not matter have wide kernels only.
//
// A device header (.cuh) that includes this one, if only by others, has what it defines in the inline
// namespace FERRY_WIDTH, so types and functions of narrow and wide kernels have different names. Everything
// outside is the same for both.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/cuda/protocol/diagnostics.hpp"
#include "backends/cuda/protocol/fault_injection.hpp"
#include "backends/cuda/protocol/host_signals.hpp"
#include "base/host_device.hpp"
#include "base/integers.hpp"
#include "ferry/exchange.hpp"
#include "layout/device_signals.hpp"
#include "layout/exchange_layout.hpp"
#include "layout/plan_layout.hpp"

#ifdef FERRY_WIDE_KERNELS
#define FERRY_WIDTH wide
#else
#define FERRY_WIDTH narrow
#endif

namespace ferry::cuda {

inline constexpr int kNarrowRanks = 32;

inline namespace FERRY_WIDTH {
#ifdef FERRY_WIDE_KERNELS
inline constexpr bool kWide = true;
inline constexpr int kKernelRanks = kMaxDeviceRanks;
#else
inline constexpr bool kWide = false;
inline constexpr int kKernelRanks = kNarrowRanks;
#endif
}  // namespace FERRY_WIDTH

// Whether the calls of a group take wide kernels. Host code.
#if FERRY_TEST_HOOKS
bool takes_wide_kernels(int ranks);  // with FERRY_WIDE=1 groups of any size do
#else
inline bool takes_wide_kernels(int ranks) {
  return ranks > kNarrowRanks;
}
#endif

inline constexpr int kMaxExperts = 1024;  // a block's shared memory holds tables of all experts
inline constexpr int kMaxBlocks = 512;    // of any launch
inline constexpr int kMaxSenders = 64;    // blocks of a dispatch that send

// The part of WireCounts that kernels count.
struct DeviceWireCounts {
  std::int64_t dispatch_bytes = 0, dispatch_messages = 0;
  std::int64_t combine_bytes = 0, combine_messages = 0;
};

// The mutable state of one lane, in device memory. Starts as zeros, except for the diagnostics and
// lowest_bad_id.
struct LaneState {
  std::uint64_t calls[kMaxBlocks];    // last call number, by block; each block reads and writes its own
  Flag aborted_call;                  // number of the last aborted call; ~0 when the exchange has failed
  unsigned long long error_claimed;   // last call in which a thread has claimed the error record
  std::uint32_t finished[kPayloads];  // blocks of the call that have sent everything; back to 0 with the last
  DeviceDiagnostics diagnostics;
  DeviceWireCounts wire;
  std::int64_t dispatches;

  // State of the call in flight, while its blocks count ids together; 0 and ~0 between calls.
  unsigned long long bad_ids, lowest_bad_id;

  // Replicated input: the hash of the last dispatch's N and ids. While blocks compute it together: their sum,
  // and how many have added to it; 0 between calls.
  std::uint64_t input_hash;
  unsigned long long hash_sum;
  std::uint32_t hashed_blocks;

  std::uint64_t further_rounds;  // call numbers that rounds of gathers have taken, beyond one a call
};

// What changes with the placement and with the seats that are present, beside the RoutingTables: the exchange
// has one, in device memory, where a captured graph sees a change. The sizes in LaneView never change.
struct Epoch {
  std::uint64_t number;  // of the group: ControlBlock::epoch()
  std::uint64_t row_order_hash, placement_version;
};

// The kinds of data that a rank sends in a call. Each has an end-of-stream flag of its own.
enum class Payload : int {
  weights,  // combine: router weights, from a token's source rank to its rows
  rows,     // everything else
};

struct LaneView {
  std::int32_t rank, ranks, experts, top_k, hidden, max_tokens, most_ranks;
  Layout layout;
  Divisor by_ranks, by_others, by_alignment;  // others: max(ranks - 1, 1)
  std::int64_t capacity;                      // of this rank: rows; expert_padded: rows of an expert
  std::int64_t capacity_rows;
  std::int32_t groups;  // of this rank, those of shared experts included
  std::int32_t shared_experts, shared_split;
  Input input;
  bool zero_padding;
  bool has_gathered;       // a gather has been enqueued: LaneState::further_rounds may not be 0
  std::uint64_t deadline;  // nanoseconds
  PlanShape plan_shape;
#if FERRY_TEST_HOOKS
  FaultInjection fault_injection;
#endif

  // Whether every token goes to every rank (Transfer::gather).
  FERRY_HD bool to_every_rank() const { return plan_shape.to_every_rank != 0; }

  // This lane's section of symmetric memory, on every rank. Of more than kNarrowRanks ranks, the first is the
  // address of a table [R] of sections in device memory instead. Kernels take it from lane_memory.cuh.
  std::byte* symmetric[kNarrowRanks];
  DeviceSignals signals;
  ExchangeLayout exchange;       // offsets relative to the lane's section: use lane 0
  std::int64_t receive_buffers;  // offset in it of the lane's own receive buffers, if it has any

  // In device memory, of the exchange.
  const std::byte* tables;  // RoutingTables
  const Epoch* epoch;
  unsigned*
      timeout_claimed;  // the last epoch in which a thread of some lane has claimed HostSignals::timeout

  // Working memory of this lane.
  LaneState* state;
  std::int32_t* block_counts;  // [kMaxSenders, 2 * count_words] a sending block's counts
  Flag* block_counted;         // [kMaxSenders] call number of those counts (release, gpu scope)
  std::int64_t* load;          // [E] routes to each expert, of all dispatches

  // In pinned host memory.
  HostSignals* report;
  DeviceError* device_error;
  HostTotals* totals;
};

// The options that all ranks must pass alike, and their hash. Ranks compare hashes; a collision of 64-bit
// hashes is unlikely enough to ignore.
struct AgreedOptions {
  Operation operation = Operation::none;
  std::int32_t option_count = 0;
  std::uint64_t hash = 0;
  std::int64_t option[kDeviceOptions] = {};

  FERRY_HD static constexpr AgreedOptions of(Operation operation) {
    AgreedOptions terms;
    terms.operation = operation;
    terms.hash = 0xcbf29ce484222325 + static_cast<std::uint64_t>(operation);
    return terms;
  }
  FERRY_HD constexpr void add(std::int64_t value) {
    option[option_count++] = value;
    mix(value);
  }
  // Replaces an option that only the device knows; every rank replaces it.
  FERRY_HD constexpr void set(int index, std::int64_t value) {
    option[index] = value;
    mix(value);
  }

 private:
  FERRY_HD constexpr void mix(std::int64_t value) {
    hash = (hash ^ static_cast<std::uint64_t>(value)) * 0x9e3779b97f4a7c15 + (hash >> 29);
  }
};

}  // namespace ferry::cuda
