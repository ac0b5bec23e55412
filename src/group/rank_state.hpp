// What stands behind a Rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "ferry/error.hpp"
#include "ferry/group.hpp"
#include "group/control_block.hpp"
#include "group/liveness_lock.hpp"
#include "group/waiter.hpp"

namespace ferry {

class RankState {
 public:
  // Collective: returns when every rank is there. Collectives of the group wait `deadline` seconds.
  RankState(std::shared_ptr<GroupControl> control, int rank, Topology topology, double deadline);

  int index() const { return rank_; }
  const Topology& topology() const { return topology_; }
  bool same_process() const { return same_process_; }
  double deadline() const { return deadline_; }
  GroupControl& control() const { return *control_; }

  void all_gather(const void* mine, void* all, std::size_t bytes);

  // Blocks until the signal is there; throws the group's failure otherwise (see Waiter).
  void wait(const Signal& signal, const WaitRecord& record, double deadline) {
    waiter_.wait(signal, record, deadline);
  }

  // See Waiter.
  void require_process(const WaitRecord& record) { waiter_.require_process(record); }
  bool look(const WaitRecord& record) { return waiter_.look(record); }
  void time_out(const WaitRecord& record, double deadline) { waiter_.time_out(record, deadline); }

 private:
  void gather_step(const std::byte* mine, std::byte* all, std::size_t bytes, std::size_t stride);

  std::shared_ptr<GroupControl> control_;
  int rank_;
  Topology topology_;
  double deadline_;
  bool same_process_ = true;
  std::uint64_t step_ = 0;
  Waiter waiter_;
  std::optional<RobustLockOwner> lock_;  // if there are peers in other processes
};

}  // namespace ferry
