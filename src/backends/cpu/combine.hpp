// Combine on the CPU. The rank that holds the experts writes into the staging of the token's source rank: one
// sum for each (token, rank) with `partial`, one row for each route with `exact` and `unreduced`. The source
// rank adds them in the order that the contract fixes.
#pragma once

#include <vector>

#include "backends/cpu/call_summary.hpp"
#include "backends/cpu/chunk_schedule.hpp"
#include "backends/cpu/lane.hpp"
#include "layout/message.hpp"

namespace ferry::cpu {

class Combine {
 public:
  explicit Combine(Lane& lane) : lane_(lane), context_(lane.context) {}

  // `split`: the caller may reuse outputs and weights after this, so rows of this rank's own tokens are
  // staged as well.
  void send(const CombineCall& call, bool split);
  void receive();

 private:
  // combine_send.cpp: on the rank of the experts. `source` is the token's source rank.
  void write_summary(int peer) const;
  void stage_chunk(std::int64_t begin, std::int64_t end);
  void stage_tokens(int source, std::int64_t begin, std::int64_t end);
  void stage_sum(int source, std::int64_t message, std::int32_t token, bool last);
  void stage_rows(int source, std::int64_t message, std::int32_t token);
  void write_route_values_of_sum(std::byte* sum, const std::int32_t* rows) const;

  // combine_sum.cpp: used by both phases
  const void* output_row(std::int64_t row) const;
  int gather_rows(const std::int32_t* rows, std::int64_t entry, const void** outputs, float* weights);
  int rows_to_prefetch(const std::int32_t* rows, const void** outputs) const;
  void sum_on_rank(void* out, const std::int32_t* rows, std::int64_t entry, Store store,
                   const std::int32_t* next_rows);

  // combine_receive.cpp: on the token's source rank
  void read_summaries();
  void receive_token(std::int64_t token, std::int64_t end);
  int local_rows_to_prefetch(std::int64_t token, const void** outputs) const;
  void add_partial_sums(std::int64_t token, std::int64_t end);
  void add_rows(std::int64_t token);
  void copy_rows(std::int64_t token);
  void write_route_values(std::int64_t token);
  // Row `index` of a token in the staging of rank `source`. partial: `index` is a position in the token's
  // list of ranks; otherwise a slot.
  std::byte* staged(int source, std::int64_t token, std::int64_t index) const {
    return lane_.combine_row(source, chunks_.staging_index(token) * staged_rows_per_token_ + index);
  }
  void local_rows(std::int64_t token, std::int32_t* rows);
  const std::byte* staged_route(std::int64_t route) const;
  const RouteTail& staged_tail(std::int64_t route) const;
  bool is_local(std::int64_t route) const;
  const void* row_of_route(std::int64_t route, int slot);
  float weight_of_route(std::int64_t route) const;
  void* result_row(std::int64_t row) const;

  Lane& lane_;
  const CpuContext& context_;

  // The current call.
  CombineCall call_;
  bool split_ = false;
  PlanView plan_{};
  PlanHeader header_{};  // as it was checked: the caller may change its plan between the phases
  CombineRowLayout layout_{};
  bool partial_ = true;
  bool carries_rows_ = true;  // false: the call carries row values only
  std::int64_t staged_rows_per_token_ = 0;
  Store staging_store_ = Store::cached, row_store_ = Store::cached;
  ChunkSchedule chunks_;
  std::vector<std::int64_t> next_;  // [R] index of the next message to each source rank
  OptionalArgument rows_, values_, weights_;
  std::vector<std::byte> scratch_;  // K rows of the combine type
};

}  // namespace ferry::cpu
