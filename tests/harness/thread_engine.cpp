#include "harness/thread_engine.hpp"

#include <condition_variable>
#include <cstddef>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include "base/text.hpp"

namespace ferry::test {

struct ThreadEngine::Shared {
  struct Transfer {
    const std::byte* send;
    const std::int64_t *send_bytes, *send_offsets;
    std::byte* receive;
    const std::int64_t *receive_bytes, *receive_offsets;
  };

  // One transfer of all ranks. It ends when every rank has copied what it receives.
  struct Meeting {
    explicit Meeting(int ranks) : posted(ranks) {}

    std::vector<Transfer> posted;
    int arrived = 0, copied = 0;
    std::int64_t number = 0;  // transfers that have ended
  };

  Shared(int of_ranks, bool in_order, Copy copies)
      : ranks(of_ranks), ordered_lanes(in_order), copy(std::move(copies)), aborted(of_ranks) {}

  const int ranks;
  const bool ordered_lanes;
  const Copy copy;
  std::mutex mutex;
  std::condition_variable changed;
  std::map<int, Meeting> lanes;
  std::vector<char> aborted;  // by rank

  void all_to_all_v(int rank, int lane, const Transfer& transfer) {
    std::unique_lock lock(mutex);
    Meeting& meeting = lanes.try_emplace(ordered_lanes ? 0 : lane, ranks).first->second;
    const std::int64_t number = meeting.number;
    meeting.posted[rank] = transfer;
    if (++meeting.arrived == ranks) changed.notify_all();
    wait(lock, rank, [&] { return meeting.arrived == ranks; });
    lock.unlock();
    copy_received(meeting, rank);
    lock.lock();
    if (++meeting.copied == ranks) {
      meeting.arrived = meeting.copied = 0;
      ++meeting.number;
      changed.notify_all();
    }
    wait(lock, rank, [&] { return meeting.number > number; });
  }

  void abort(int rank) {
    const std::lock_guard lock(mutex);
    aborted[rank] = 1;
    changed.notify_all();
  }

 private:
  void copy_received(const Meeting& meeting, int rank) const {
    const Transfer& mine = meeting.posted[rank];
    for (int peer = 0; peer < static_cast<int>(meeting.posted.size()); ++peer) {
      const Transfer& from = meeting.posted[peer];
      const std::int64_t bytes = from.send_bytes[rank];
      if (bytes != mine.receive_bytes[peer]) {
        throw std::runtime_error(str("rank ", peer, " sends ", bytes, " bytes to rank ", rank,
                                     ", which expects ", mine.receive_bytes[peer]));
      }
      if (bytes == 0) continue;
      std::byte* to = mine.receive + mine.receive_offsets[peer];
      const std::byte* sent = from.send + from.send_offsets[rank];
      if (copy) {
        copy(to, sent, bytes);
      } else {
        std::memcpy(to, sent, static_cast<std::size_t>(bytes));
      }
    }
  }

  template <class Condition>
  void wait(std::unique_lock<std::mutex>& lock, int rank, const Condition& met) {
    changed.wait(lock, [&] { return met() || aborted[rank]; });
    if (!met()) throw std::runtime_error(str("rank ", rank, " aborted its engine"));
  }
};

ThreadEngine::ThreadEngine(int ranks, bool ordered_lanes, Copy copy)
    : shared_(std::make_shared<Shared>(ranks, ordered_lanes, std::move(copy))) {}

EngineFunctions ThreadEngine::functions(int rank) const {
  EngineFunctions functions;
  functions.all_to_all_v = [shared = shared_, rank](
                               int lane, const void* send, const std::int64_t* send_bytes,
                               const std::int64_t* send_offsets, void* receive,
                               const std::int64_t* receive_bytes, const std::int64_t* receive_offsets) {
    shared->all_to_all_v(rank, lane,
                         {static_cast<const std::byte*>(send), send_bytes, send_offsets,
                          static_cast<std::byte*>(receive), receive_bytes, receive_offsets});
  };
  functions.abort = [shared = shared_, rank] { shared->abort(rank); };
  functions.ordered_lanes = shared_->ordered_lanes;
  functions.device_memory = static_cast<bool>(shared_->copy);
  return functions;
}

}  // namespace ferry::test
