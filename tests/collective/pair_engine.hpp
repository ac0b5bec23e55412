// An engine between threads in which, as in MPI and NCCL, a rank waits only for the ranks that send to it.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "ferry/engine.hpp"

namespace ferry::test {

class PairEngine {
 public:
  explicit PairEngine(int ranks) : shared_(std::make_shared<Shared>()), ranks_(ranks) {}

  EngineFunctions functions(int rank) const {
    EngineFunctions functions;
    functions.ordered_lanes = false;
    functions.all_to_all_v = [shared = shared_, ranks = ranks_, rank](
                                 int lane, const void* send, const std::int64_t* send_bytes,
                                 const std::int64_t* send_offsets, void* receive,
                                 const std::int64_t* receive_bytes, const std::int64_t* receive_offsets) {
      std::unique_lock lock(shared->mutex);
      for (int peer = 0; peer < ranks; ++peer) {
        const auto* from = static_cast<const char*>(send) + send_offsets[peer];
        if (send_bytes[peer] > 0)
          shared->sent[{lane, rank, peer}].emplace_back(from, from + send_bytes[peer]);
      }
      shared->changed.notify_all();
      std::set<int> missing;
      for (int peer = 0; peer < ranks; ++peer) {
        if (receive_bytes[peer] > 0) missing.insert(peer);
      }
      while (!missing.empty()) {
        const auto sender = std::find_if(missing.begin(), missing.end(),
                                         [&](int peer) { return !shared->sent[{lane, peer, rank}].empty(); });
        if (sender == missing.end()) {
          if (shared->aborted.contains(rank)) throw std::runtime_error("aborted");
          shared->changed.wait(lock);
          continue;
        }
        std::deque<std::vector<char>>& messages = shared->sent[{lane, *sender, rank}];
        if (messages.front().size() != static_cast<std::size_t>(receive_bytes[*sender]))
          throw std::runtime_error("a message of another size");
        std::memcpy(static_cast<char*>(receive) + receive_offsets[*sender], messages.front().data(),
                    messages.front().size());
        messages.pop_front();
        missing.erase(sender);
      }
    };
    functions.abort = [shared = shared_, rank] {
      const std::lock_guard lock(shared->mutex);
      shared->aborted.insert(rank);
      shared->changed.notify_all();
    };
    return functions;
  }

 private:
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    std::map<std::tuple<int, int, int>, std::deque<std::vector<char>>> sent;  // by lane, sender, receiver
    std::set<int> aborted;
  };

  const std::shared_ptr<Shared> shared_;
  const int ranks_;
};

}  // namespace ferry::test
