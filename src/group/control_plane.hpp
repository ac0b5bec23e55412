// How the ranks of a group agree on small data: the collective behind Rank::all_gather and everything that
// ranks decide together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "group/bootstrap_link.hpp"
#include "group/control_block.hpp"
#include "group/waiter.hpp"

namespace ferry {

// One rank's end. Failures, liveness and the deadline are the group's: an implementation ends its waits with
// the errors of Waiter::wait, and fails the group when it gives up.
class ControlPlane {
 public:
  virtual ~ControlPlane() = default;

  // Collective, as Rank::all_gather; 0 bytes: a barrier. One thread at a time.
  virtual void all_gather(const void* mine, void* all, std::size_t bytes) = 0;
};

// The control plane of a group on one host: slots in the control block.
class SharedMemoryPlane : public ControlPlane {
 public:
  // A collective fails after `deadline` seconds. Keeps both references.
  SharedMemoryPlane(ControlBlock& control, Waiter& waiter, int rank, double deadline)
      : control_(control), waiter_(waiter), rank_(rank), deadline_(deadline) {}

  void all_gather(const void* mine, void* all, std::size_t bytes) override;

 private:
  void gather_part(const std::byte* mine, std::byte* all, std::size_t bytes, std::size_t stride);

  ControlBlock& control_;
  Waiter& waiter_;
  int rank_;
  double deadline_;
  std::uint64_t step_ = 0;  // one for every part
};

// The control plane of a group over several hosts: data goes over the bootstrap, failures and liveness are
// seen in the control block of this host.
//
// A rank of this host that dies, fails or leaves ends the collectives of this host at once; a rank of another
// host ends them by the deadline. Each host has its own failure record.
class BootstrapPlane : public ControlPlane {
 public:
  // A collective fails after `deadline` seconds. Keeps the references.
  BootstrapPlane(ControlBlock& control, Waiter& waiter, int rank, const Topology& topology, double deadline,
                 std::unique_ptr<BootstrapLink> link);

  void all_gather(const void* mine, void* all, std::size_t bytes) override;

 private:
  // Goes before every part on the link, so that mixed-up data is noticed.
  struct Header {
    std::int64_t rank;
    std::uint64_t step;
    std::uint64_t bytes;  // of the whole all_gather
  };

  std::vector<std::byte> exchange(std::vector<std::byte> message);
  void check(const WaitLimit& limit);
  void check_local_ranks();
  int find_lost_rank() const;
  void time_out(const WaitLimit& limit);
  void check_headers(const std::vector<std::byte>& gathered, std::size_t message_bytes, const Header& mine);
  WaitRecord record_of(int peer) const { return {Operation::barrier, step_, rank_, peer, step_, step_ - 1}; }

  ControlBlock& control_;
  Waiter& waiter_;
  int rank_;
  std::vector<int> local_ranks_, remote_ranks_;  // without this rank
  double deadline_;
  std::unique_ptr<BootstrapLink> link_;
  std::uint64_t step_ = 0;                   // one for every part
  WaitLimit::Clock::time_point next_check_;  // of the processes of local ranks
};

}  // namespace ferry
