// Combine on the CPU: rows (exact, unreduced) or one sum for each (token, rank) (partial) go into the home
// rank's staging, which adds them in the order of the contract.
#pragma once

#include <vector>

#include "backends/cpu/call_summary.hpp"
#include "backends/cpu/chunk_schedule.hpp"
#include "backends/cpu/lane.hpp"
#include "layout/message.hpp"

namespace ferry::cpu {

class Combine {
 public:
  explicit Combine(Lane& lane) : lane_(lane), shared_(lane.shared) {}

  // `split`: outputs and weights may be reused after the send half, so what stays at home is staged as well.
  void send(const CombineCall& call, bool split);
  void receive();

 private:
  // combine_send.cpp
  void write_note(int peer) const;
  void stage_chunk(std::int64_t begin, std::int64_t end);
  void stage_tokens(int home, std::int64_t begin, std::int64_t end);
  void stage_sum(int home, std::int64_t message, std::int32_t token, bool another);
  void stage_rows(int home, std::int64_t message, std::int32_t token);
  void write_sum_tail(std::byte* row, const std::int32_t* rows) const;

  // combine_sum.cpp: what both halves compute
  const void* output_row(std::int64_t row) const;
  int gather_rows(const std::int32_t* rows, std::int64_t where, const void** outputs, float* weights);
  int rows_to_fetch(const std::int32_t* rows, const void** outputs) const;
  void sum_on_rank(void* out, const std::int32_t* rows, std::int64_t where, Store store,
                   const std::int32_t* next_rows);

  // combine_receive.cpp
  void receive_token(std::int64_t token, std::int64_t end);
  int own_rows_to_fetch(std::int64_t token, const void** outputs) const;
  void reduce_sums(std::int64_t token, std::int64_t end);
  void reduce_rows(std::int64_t token);
  void copy_rows(std::int64_t token);
  void bring_values(std::int64_t token);
  // Row `index` of a token's rows in the staging at `home`: a position of its ranks, or a slot.
  std::byte* staged(int home, std::int64_t token, std::int64_t index) const {
    return lane_.combine_row(home, chunks_.place(token) * rows_of_token_ + index);
  }
  void own_rows(std::int64_t token, std::int32_t* rows);
  const std::byte* staged_route(std::int64_t route) const;
  const RouteTail& staged_tail(std::int64_t route) const;
  bool stays_home(std::int64_t route) const;
  const void* row_at_home(std::int64_t route, int slot);
  float weight_at_home(std::int64_t route) const;
  void* result_row(std::int64_t row) const;

  Lane& lane_;
  const Shared& shared_;

  // The call in flight.
  CombineCall call_;
  bool split_ = false;
  PlanView plan_{};
  CombineRowLayout layout_{};
  bool partial_ = true;
  bool carries_rows_ = true;
  std::int64_t rows_of_token_ = 0;  // in the staging
  Store staging_store_ = Store::cached, row_store_ = Store::cached;
  Chunks chunks_;
  std::vector<std::int64_t> next_;  // [R] the next message to each home
  Presence rows_, values_, weights_;
  std::vector<std::byte> scratch_;  // K rows of the wire type
};

}  // namespace ferry::cpu
