// The state behind a Rank handle: the rank's view of the control block, its waiter and its liveness lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "base/process.hpp"
#include "ferry/error.hpp"
#include "ferry/group.hpp"
#include "group/bootstrap_link.hpp"
#include "group/control_block.hpp"
#include "group/liveness.hpp"
#include "group/waiter.hpp"

namespace ferry {

class Engine;

// What a rank needs to take part in a group.
struct Membership {
  std::shared_ptr<ControlBlock> control;  // shared with the ranks of this host
  int rank;
  Topology topology;
  std::unique_ptr<BootstrapLink> link = nullptr;  // to the other hosts; null: all ranks are on this host
};

// How the ranks of a group agree on small data: the collective behind Rank::all_gather and everything that
// ranks decide together.
//
// One rank's end. Failures, liveness and the deadline are the group's: an implementation ends its waits with
// the errors of Waiter::wait, and fails the group when it gives up.
class ControlPlane {
 public:
  virtual ~ControlPlane() = default;

  // Collective, as Rank::all_gather; 0 bytes: a barrier. One thread at a time.
  virtual void all_gather(const void* mine, void* all, std::size_t bytes) = 0;
};

// Keeps the references. `link`: as in Membership. A collective fails after `deadline` seconds.
std::unique_ptr<ControlPlane> make_control_plane(ControlBlock& control, Waiter& waiter, int rank,
                                                 const Topology& topology, double deadline,
                                                 std::unique_ptr<BootstrapLink> link);

class RankState {
 public:
  // Collective: returns when every rank has joined. Collectives of the group itself fail after `deadline`
  // seconds. `engine`: the transport that the group brought for the backend `collective`; null: none.
  RankState(Membership membership, double deadline, std::shared_ptr<Engine> engine);

  int index() const { return rank_; }
  // Whether this is the process that has joined, and not one forked from it. Such a copy takes no part in the
  // group and destroys nothing: threads, mappings and peers are the rank's.
  bool in_own_process() const { return this_process() == process_; }
  // Throws UsageError in a forked copy, whose `what` belongs to the rank.
  void require_own_process(const char* what) const { ferry::require_own_process(what, process_); }
  const Topology& topology() const { return topology_; }
  bool same_process() const { return same_process_; }
  // Whether all ranks are on one host, and so share the control block.
  bool one_host() const { return one_host_; }
  double deadline() const { return deadline_; }
  ControlBlock& control() const { return *control_; }
  Engine* engine() const { return engine_.get(); }
  // The engine of exchanges that ask for NCCL, in a group with any engine of its own; null until one has
  // asked.
  const std::shared_ptr<Engine>& nccl_engine() const { return nccl_engine_; }
  void set_nccl_engine(std::shared_ptr<Engine> engine) { nccl_engine_ = std::move(engine); }
  // Group-wide number of a lane whose calls an engine or windows carry: equal on all ranks because they
  // construct lanes in the same order.
  int number_lane() { return numbered_lanes_++; }

  void all_gather(const void* mine, void* all, std::size_t bytes);

  // Forwarded to Waiter.
  void wait(const WaitCondition& condition, const WaitRecord& record, const WaitLimit& limit,
            int excused = -1) {
    waiter_.wait(condition, record, limit, excused);
  }
  bool check_peers(const WaitRecord& record) { return waiter_.check_peers(record); }
  bool check_interrupt(const WaitRecord& record) { return waiter_.check_interrupt(record); }
  void time_out(const WaitRecord& record, double deadline) { waiter_.time_out(record, deadline); }

  // Bytes that the chunks in flight of all ranks of a host backend may occupy together: a part of a large
  // cache, because the rows pass through it as well. Set it before an exchange is constructed, to the same
  // value on every rank.
  std::int64_t chunk_budget() const { return chunk_budget_; }
  void set_chunk_budget(std::int64_t bytes) { chunk_budget_ = bytes; }

 private:
  std::shared_ptr<ControlBlock> control_;
  int rank_, process_ = this_process();
  Topology topology_;
  double deadline_;
  std::shared_ptr<Engine> engine_, nccl_engine_;
  int numbered_lanes_ = 0;
  bool same_process_ = true;
  bool one_host_;
  std::int64_t chunk_budget_ = 8 << 20;
  Waiter waiter_;
  std::unique_ptr<ControlPlane> plane_;
  std::optional<LivenessLockHolder> liveness_lock_;  // only if some ranks are other processes
};

}  // namespace ferry
