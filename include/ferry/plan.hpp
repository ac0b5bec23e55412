// A plan: all that follows from ids and placement, as a value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "ferry/config.hpp"

namespace ferry {

// The place a row came from; {-1, -1, -1} for padding. rank_major rows stand for a whole token: slot -1.
struct Source {
  std::int32_t rank = -1;
  std::int32_t token = -1;
  std::int32_t slot = -1;

  friend bool operator==(const Source&, const Source&) = default;
};

// A handle on a plan's storage: a block of plan_bytes(config, ranks) bytes without pointers, weights or
// formats. It can be copied byte for byte, kept for a backward pass, and used for any number of dispatches
// and combines of an exchange with the same configuration on the same rank. The accessors read host memory.
class Plan {
 public:
  Plan() = default;

  // Uses storage of the caller (aligned to 16 bytes) that must outlive the handle.
  static Plan over(void* storage, std::size_t bytes) { return Plan(storage, bytes, nullptr); }

  bool empty() const { return storage_ == nullptr; }
  void* storage() const { return storage_; }
  std::size_t bytes() const { return bytes_; }

  // A plan of its own, independent of the lane's next dispatch.
  Plan copy() const;

  int rank() const;
  int ranks() const;
  int tokens() const;  // N of this rank
  std::uint64_t placement_version() const;
  std::int64_t total() const;    // rows on this rank, padding between groups included
  std::int64_t dropped() const;  // routes (rank_major: rows) dropped on all ranks

  std::span<const std::int32_t> counts() const;  // [ranks, experts] routes of every rank to every expert
  std::span<const std::int32_t> tokens_between() const;  // [ranks, ranks] tokens that rank s sends to rank d
  std::span<const Source> sources() const;               // [total]
  int destination(int token, int slot) const;            // rank, or -1 for a masked slot
  std::int64_t row(int token, int slot) const;           // row there, or -1: masked or dropped

 private:
  Plan(void* storage, std::size_t bytes, std::shared_ptr<void> owner)
      : storage_(storage), bytes_(bytes), owner_(std::move(owner)) {}

  void* storage_ = nullptr;
  std::size_t bytes_ = 0;
  std::shared_ptr<void> owner_;
};

}  // namespace ferry
