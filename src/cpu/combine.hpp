// Combine on the CPU: rows (exact, unreduced) or one sum for each (token, rank) (partial) go into the home
// rank's staging, which adds them in the order of the contract.
#pragma once

#include <vector>

#include "cpu/lane.hpp"
#include "cpu/presence.hpp"
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
  void stage_sums(int home);
  void stage_rows(int home);
  void prefetch_rows(std::int64_t message) const;
  void write_sum_tail(std::byte* row, const std::int32_t* rows) const;

  // combine_sum.cpp: what both halves compute
  const void* output_row(std::int64_t row) const;
  int gather_rows(const std::int32_t* rows, std::int64_t where, const void** outputs, float* weights);
  void sum_on_rank(void* out, const std::int32_t* rows, std::int64_t where, Store store);

  // combine_receive.cpp
  void reduce_sums(std::int64_t token);
  void reduce_rows(std::int64_t token);
  void copy_rows(std::int64_t token);
  void bring_values(std::int64_t token);
  const std::byte* staged(std::int64_t row) const { return lane_.combine_row(shared_.me(), row); }
  const RouteTail& staged_tail(std::int64_t row) const;
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
  Store store_ = Store::cached;
  Presence rows_, values_, weights_;
  std::vector<std::byte> scratch_;  // K rows of the wire type
};

}  // namespace ferry::cpu
