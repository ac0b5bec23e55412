// The collectives of a group: on one host in the control block, over several hosts by a bootstrap.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "base/text.hpp"
#include "group/rank_state.hpp"

namespace ferry {
namespace {

std::string size_fault(int rank, std::uint64_t mine, int peer, std::uint64_t theirs) {
  const auto of = [](std::uint64_t bytes) { return str(bytes, bytes == 0 ? " (a barrier)" : ""); };
  return str("all_gather: every rank must pass the same number of bytes; rank ", rank, " passes ", of(mine),
             ", rank ", peer, " passes ", of(theirs));
}

// The control plane of a group on one host: slots in the control block.
class SharedMemoryPlane : public ControlPlane {
 public:
  // A collective fails after `deadline` seconds. Keeps both references.
  SharedMemoryPlane(ControlBlock& control, Waiter& waiter, int rank, double deadline)
      : control_(control), waiter_(waiter), rank_(rank), deadline_(deadline) {}

  void all_gather(const void* mine, void* all, std::size_t bytes) override {
    if (control_.failed())
      control_.throw_failure({Operation::barrier, step_ + 1, rank_, -1, step_ + 1, step_});
    const auto* in = static_cast<const std::byte*>(mine);
    auto* out = static_cast<std::byte*>(all);
    std::size_t done = 0;
    do {
      const std::size_t part = std::min(bytes - done, GatherSlot::kPartBytes);
      gather_part(in + done, out + done, part, bytes);
      done += part;
    } while (done < bytes);
  }

 private:
  // Two buffers are enough: a rank writes step n+2 after it has seen step n+1 of every peer, and a peer
  // stores n+1 only after it has read the parts of n.
  void gather_part(const std::byte* mine, std::byte* all, std::size_t bytes, std::size_t stride) {
    const std::uint64_t step = ++step_;
    const std::size_t parity = step & 1;
    GatherSlot& own_slot = control_.gather_slot(rank_);
    own_slot.bytes[parity] = stride;
    if (bytes > 0) std::memcpy(own_slot.parts[parity], mine, bytes);
    // Release: orders the part before the step. Sequentially consistent because WakeEvent requires it.
    own_slot.step.store(step, std::memory_order_seq_cst);
    for (int peer = 0; peer < control_.ranks(); ++peer) {
      if (peer != rank_) control_.wake_event(peer).ring();
    }
    const WaitLimit limit{.seconds = deadline_};
    std::string fault;  // then every rank finds one, in this step
    for (int peer = 0; peer < control_.ranks(); ++peer) {
      const GatherSlot& slot = control_.gather_slot(peer);
      waiter_.wait({&slot.step}, {Operation::barrier, step, rank_, peer, step, 0}, limit);
      if (slot.bytes[parity] != stride && fault.empty())
        fault = size_fault(rank_, stride, peer, slot.bytes[parity]);
      if (bytes > 0) std::memcpy(all + peer * stride, slot.parts[parity], bytes);
    }
    if (!fault.empty()) throw UsageError(fault);
  }

  ControlBlock& control_;
  Waiter& waiter_;
  int rank_;
  double deadline_;
  std::uint64_t step_ = 0;  // one for every part
};

// Bytes of one rank in one call of the link. Bounds the memory of large gathers.
constexpr std::size_t kPartBytes = 16384;

// Between two checks of the local ranks' processes. A rank that ends by an error is noticed sooner.
constexpr std::chrono::milliseconds kCheckInterval(50);

// The control plane of a group over several hosts: data goes over the bootstrap, failures and liveness are
// seen in the control block of this host.
//
// A rank of this host that dies, fails or leaves ends the collectives of this host at once; a rank of another
// host ends them by the deadline. Each host has its own failure record.
class BootstrapPlane : public ControlPlane {
 public:
  // A collective fails after `deadline` seconds. Keeps the references.
  BootstrapPlane(ControlBlock& control, Waiter& waiter, int rank, const Topology& topology, double deadline,
                 std::unique_ptr<BootstrapLink> link)
      : control_(control), waiter_(waiter), rank_(rank), deadline_(deadline), link_(std::move(link)) {
    for (int peer = 0; peer < topology.ranks(); ++peer) {
      if (peer == rank) continue;
      (topology.node_of(peer) == topology.node_of(rank) ? local_ranks_ : remote_ranks_).push_back(peer);
    }
  }

  void all_gather(const void* mine, void* all, std::size_t bytes) override {
    const auto* in = static_cast<const std::byte*>(mine);
    auto* out = static_cast<std::byte*>(all);
    std::size_t done = 0;
    do {
      const std::size_t part = std::min(bytes - done, kPartBytes);
      ++step_;
      if (control_.failed()) control_.throw_failure(record_of(-1));
      CollectiveProgress& progress = control_.progress(rank_);
      progress.begun.store(step_, std::memory_order_release);
      const Header header{rank_, step_, bytes};
      std::vector<std::byte> message(sizeof header + part);
      std::memcpy(message.data(), &header, sizeof header);
      if (part > 0) std::memcpy(message.data() + sizeof header, in + done, part);
      const std::vector<std::byte> gathered = exchange(std::move(message));
      check_headers(gathered, sizeof header + part, header);
      // Release: a peer that sees this rank end sees this as well.
      progress.done.store(step_, std::memory_order_release);
      for (std::size_t peer = 0; part > 0 && peer * (sizeof header + part) < gathered.size(); ++peer) {
        std::memcpy(out + peer * bytes + done,
                    gathered.data() + peer * (sizeof header + part) + sizeof header, part);
      }
      done += part;
    } while (done < bytes);
  }

 private:
  // Goes before every part on the link, so that mixed-up data is noticed.
  struct Header {
    std::int64_t rank;
    std::uint64_t step;
    std::uint64_t bytes;  // of the whole all_gather
  };

  std::vector<std::byte> exchange(std::vector<std::byte> message) {
    const WaitLimit limit{.seconds = deadline_};
    try {
      return link_->all_gather(std::move(message), [&] { check(limit); });
    } catch (...) {
      // check() has failed the group before it throws; other exceptions are the bootstrap's own. The ranks of
      // this host need not wait for this rank then.
      const std::string text = ErrorRecord::of(std::current_exception()).text;
      control_.fail(rank_, failure_record(ErrorRecord::Kind::peer_lost, record_of(rank_),
                                          str("rank ", rank_, ": the bootstrap failed: ", text)));
      throw;
    }
  }

  void check(const WaitLimit& limit) {
    const WaitLimit::Clock::time_point now = WaitLimit::Clock::now();
    if (control_.failed() || now >= next_check_) {
      next_check_ = now + kCheckInterval;
      check_local_ranks();
    }
    if (limit.seconds_left() <= 0) time_out(limit);
    if (waiter_.check_interrupt(record_of(-1))) control_.throw_failure(record_of(-1));
  }

  // Throws if a rank of this host has ended before its part of this collective was complete. A rank that ends
  // later does not end the collective of the others.
  void check_local_ranks() {
    const int lost = find_lost_rank();
    if (!control_.failed()) waiter_.check_peers(record_of(lost));
    if (!control_.failed()) return;
    const int culprit = control_.failure().wait.peer;
    const bool culprit_is_done =
        lost < 0 && culprit >= 0 && control_.progress(culprit).done.load(std::memory_order_acquire) >= step_;
    if (!culprit_is_done) control_.throw_failure(record_of(lost));
  }

  // A rank of this host that has ended and has not completed this collective, or -1. A process that has died
  // without a word is found by Waiter::check_peers().
  int find_lost_rank() const {
    for (const int peer : local_ranks_) {
      // Order matters: a rank that has left has stored its progress before.
      const RankStatus status = control_.status_of(peer);
      if (status != RankStatus::left && status != RankStatus::failed) continue;
      if (control_.progress(peer).done.load(std::memory_order_acquire) < step_) return peer;
    }
    return -1;
  }

  void time_out(const WaitLimit& limit) {
    const auto late = std::find_if(local_ranks_.begin(), local_ranks_.end(), [&](int peer) {
      return control_.progress(peer).begun.load(std::memory_order_acquire) < step_;
    });
    if (late != local_ranks_.end()) {
      waiter_.time_out(record_of(*late), limit.seconds);
    } else {
      std::string ranks;
      for (const int peer : remote_ranks_) ranks += str(ranks.empty() ? "" : ", ", peer);
      const int only = remote_ranks_.size() == 1 ? remote_ranks_.front() : -1;
      control_.fail(
          rank_,
          failure_record(ErrorRecord::Kind::timeout, record_of(only),
                         str("no sign for ", limit.seconds, " s of a rank on another host: rank ", rank_,
                             " waited in collective ", step_, " of the group for ranks ", ranks)));
    }
    control_.throw_failure(record_of(-1));
  }

  void check_headers(const std::vector<std::byte>& gathered, std::size_t message_bytes, const Header& mine) {
    std::string fault;
    for (std::size_t peer = 0; peer * message_bytes < gathered.size() && fault.empty(); ++peer) {
      Header header{};
      std::memcpy(&header, gathered.data() + peer * message_bytes, sizeof header);
      if (header.rank != static_cast<std::int64_t>(peer)) {
        fault = str("Bootstrap::all_gather returned the data of rank ", header.rank, " at the index of rank ",
                    peer);
      } else if (header.step != mine.step) {
        fault = str("Bootstrap::all_gather returned what rank ", peer, " passed in collective ", header.step,
                    " of the group, in collective ", mine.step);
      } else if (header.bytes != mine.bytes) {
        fault = size_fault(rank_, mine.bytes, static_cast<int>(peer), header.bytes);
      }
    }
    if (fault.empty()) return;
    control_.fail(rank_, failure_record(ErrorRecord::Kind::usage, record_of(rank_), fault));
    throw UsageError(fault);
  }

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

}  // namespace

std::unique_ptr<ControlPlane> make_control_plane(ControlBlock& control, Waiter& waiter, int rank,
                                                 const Topology& topology, double deadline,
                                                 std::unique_ptr<BootstrapLink> link) {
  if (link == nullptr) return std::make_unique<SharedMemoryPlane>(control, waiter, rank, deadline);
  return std::make_unique<BootstrapPlane>(control, waiter, rank, topology, deadline, std::move(link));
}

}  // namespace ferry
