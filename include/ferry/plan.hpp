// Plans: the destination and row of every route of a dispatch. Combine reads the plan; it can be kept and
// reused for later dispatches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "ferry/config.hpp"

namespace ferry {

/// Where a received row comes from. Padding rows have {-1, -1, -1}; rank_major rows, which stand for a whole
/// token, have slot -1; rows of shared expert s have slot K + s and are this rank's own.
struct Source {
  std::int32_t rank = -1;
  std::int32_t token = -1;
  std::int32_t slot = -1;

  friend bool operator==(const Source&, const Source&) = default;
};

/// A handle to a plan: one block of plan_bytes(config, ranks) bytes.
///
/// The block holds indices only: no pointers, weights or formats. It may be copied byte for byte, kept for a
/// backward pass, and used for any number of dispatches and combines, on the same rank and by any exchange
/// with the same placement, layout and sizes.
///
/// Ownership: copies of a handle refer to the same block. The block belongs to the lane (until its next
/// dispatch), to the caller (over(), ReceiveBuffers::plan), or to the handles (copy()). Host backends refuse
/// a handle whose block a later dispatch has filled; device backends cannot tell, and use the later plan.
///
/// The accessors from rank() on read the block in host memory: bring a plan of a device backend to the host
/// first. They throw UsageError if the block holds no complete plan, or if it has no such token or slot.
class Plan {
 public:
  Plan() = default;

  /// A plan in storage of the caller, aligned to 16 bytes, that must outlive the handle. Checked when it is
  /// used.
  ///
  /// @param call  as call(): a block that another dispatch has filled is then refused
  static Plan over(void* storage, std::size_t bytes, std::uint64_t call = 0) {
    return Plan(storage, bytes, call, nullptr);
  }

  bool empty() const { return storage_ == nullptr; }
  void* storage() const { return storage_; }  ///< device backends: device memory, apart from copies
  std::size_t bytes() const { return bytes_; }
  /// Call number of the plan's dispatch. 0: any. Device backends give 0, because a captured
  /// dispatch has another number in each replay.
  std::uint64_t call() const { return call_; }

  /// A copy in host memory of its own, which the lane's next dispatch does not overwrite. The plan must be in
  /// host memory.
  Plan copy() const;

  int rank() const;    ///< the rank whose plan it is
  int ranks() const;   ///< R
  int tokens() const;  ///< N of this rank
  std::uint64_t placement_version() const;
  std::int64_t total() const;    ///< rows on this rank, padding between groups included
  std::int64_t dropped() const;  ///< routes and shared rows dropped on all ranks together (rank_major: rows)

  /// Routes of every rank to every expert, [R, E]; to every replica, [R, P]. Shared experts have no routes.
  std::span<const std::int32_t> counts() const;
  /// Tokens that rank s sends to rank d, at [s, d] of [R, R].
  std::span<const std::int32_t> tokens_between() const;
  /// Source of every row on this rank, [total].
  std::span<const Source> sources() const;
  /// Rank of the slot's expert; -1 for a masked slot.
  int destination(int token, int slot) const;
  /// Row of the slot on its destination; -1 if masked or dropped.
  std::int64_t row(int token, int slot) const;

 private:
  Plan(void* storage, std::size_t bytes, std::uint64_t call, std::shared_ptr<void> owner)
      : storage_(storage), bytes_(bytes), call_(call), owner_(std::move(owner)) {}

  void* storage_ = nullptr;
  std::size_t bytes_ = 0;
  std::uint64_t call_ = 0;
  std::shared_ptr<void> owner_;  // null if the storage belongs to the lane or the caller
};

}  // namespace ferry
