// Dispatch on the CPU: every token goes once to each rank that has one of its experts, into that rank's
// staging for this source; the receiver spreads it to the rows of its experts.
#pragma once

#include <vector>

#include "backends/cpu/call_summary.hpp"
#include "backends/cpu/chunk_schedule.hpp"
#include "backends/cpu/lane.hpp"
#include "layout/message.hpp"
#include "plan/planning.hpp"

namespace ferry::cpu {

class Dispatch {
 public:
  explicit Dispatch(Lane& lane) : lane_(lane), shared_(lane.shared) {}

  // `split`: the caller may reuse its memory after the send half, so this rank's own tokens are staged as
  // well.
  void send(const DispatchCall& call, bool split);
  DispatchResult receive();

 private:
  // Parts of a row wherever they lie: in a message, or with the caller.
  struct Row {
    const std::byte* parts[kMaxParts];
    const std::int32_t* ids;  // global, [K]
    const float* weights;     // [K]
  };

  // dispatch_send.cpp
  void start_plan(std::uint64_t call);
  void write_note(int peer, std::int64_t most) const;
  std::int64_t most_messages();
  void stage_chunk(std::int64_t begin, std::int64_t end);
  void stage_messages(int destination, std::int64_t begin, std::int64_t end);
  void encode(std::int64_t token, std::byte* message) const;
  const std::byte* caller_row(int part, std::int64_t token) const;
  int position_of(std::int64_t token, int rank) const;

  // dispatch_receive.cpp
  void take_note(int peer);
  void finish_plan();
  void copy_usable_counts();
  void receive_chunks();
  void lay_out_from(int source, std::int64_t begin, std::int64_t end, ArrivalPlacer& placer);
  Row staged_row(const std::byte* message) const;
  Row own_row(std::int64_t token);
  void count_load();

  // dispatch_rows.cpp
  void prepare_received();
  void write_rows(const Row& row, const std::int32_t* rows);
  void write_token_row(const Row& row, const std::int32_t* rows);
  void store_parts(const Row& row, const std::int32_t* rows, int count);
  void compute_row(const Row& row, std::int32_t to, float weight);
  void write_groups();
  void write_padding(std::int64_t begin, std::int64_t end);

  Lane& lane_;
  const Shared& shared_;

  // The call in flight.
  DispatchCall call_;
  bool split_ = false;
  bool replay_ = false;
  PlanView plan_{};
  PartList parts_;
  MessageLayout layout_{};
  Store staging_store_ = Store::cached, row_store_ = Store::cached;
  Chunks chunks_;
  Presence weights_;
  RowPlaces places_;
  DispatchResult received_;
  std::vector<std::int32_t> usable_counts_;  // of a plan that came with the call
  std::vector<std::byte> scratch_;           // one message
};

}  // namespace ferry::cpu
