// What a lane of the CPU backend owns on one rank, and the addresses its operations use.
#pragma once

#include <cstdint>
#include <vector>

#include "backends/cpu/kernels.hpp"
#include "exchange/backend.hpp"
#include "exchange/configuration.hpp"
#include "format/parts.hpp"
#include "group/channel.hpp"
#include "layout/exchange_layout.hpp"
#include "memory/local_memory.hpp"
#include "memory/symmetric_memory.hpp"

namespace ferry::cpu {

// What all lanes of an exchange share. Read only after construction.
struct Shared {
  Rank rank;
  Config config;
  ExchangeLayout layout;
  SymmetricMemory memory;
  PlanShape plan_shape;
  std::uint64_t row_order_hash;
  std::int64_t chunk_messages;  // of a dispatch, to one rank
  std::int64_t chunk_tokens;    // of a combine, at home
  const Kernels& kernels;

  int me() const { return rank.index(); }
  int ranks() const { return rank.size(); }
};

// Offsets of a lane's own arrays: one chain for the size query and for construction.
struct LaneArrays {
  std::int64_t plan = 0;
  std::int64_t parts = 0;  // one area, laid out anew by every dispatch: formats differ in their parts
  std::int64_t weight = 0, local_ids = 0, dots = 0, row_weights = 0;
  std::int64_t group_expert = 0, counts = 0, row_offsets = 0;
  std::int64_t parts_bytes = 0;  // of the arrivals' parts
  std::int64_t bytes = 0;        // of everything
};
LaneArrays lane_arrays(const Config& config, int rank);

class Lane {
 public:
  Lane(const Shared& of_exchange, int number);

  const Shared& shared;
  const int index;
  Channel channel;
  const LaneArrays arrays;

  CallDiagnostics findings;  // since the last check
  WireCounts wire;
  std::vector<std::int64_t> expert_load;  // [E] routes of all ranks
  std::int64_t dispatches = 0;
  StepMetadata metadata;
  HostTotals totals;

  template <class T>
  T* array(std::int64_t offset) const {
    return reinterpret_cast<T*>(local_.data() + offset);
  }

  // Message i of `source` in the staging of rank `at`, current generation.
  std::byte* message(int at, int source, std::int64_t i, std::int64_t bytes) const {
    return shared.memory.at(at, shared.layout.messages_of(index, channel.parity(), source) + i * bytes);
  }
  // Row of combine's staging at rank `home`.
  std::byte* combine_row(int home, std::int64_t row) const {
    return shared.memory.at(home, shared.layout.combine_of(index, channel.parity()) +
                                      row * shared.layout.shape.combine_row_bytes);
  }

  // Plans may be damaged between calls: entries are looked at before they are used, and counted when bad.
  bool usable(std::int32_t value, std::int64_t limit, std::int64_t where) {
    if (value >= 0 && value < limit) return true;
    record_bad_source(where);
    return false;
  }
  void record_bad_source(std::int64_t where);
  // Messages from `source` to `destination` by a plan.
  int messages_between(const PlanView& plan, int source, int destination);

 private:
  LocalMemory local_;
};

// Stores that go past the cache pay when the call moves more than the cache holds.
Store store_for(std::int64_t bytes);

}  // namespace ferry::cpu
