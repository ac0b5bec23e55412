// An engine between processes of one machine: every pair of ranks has a pipe in each direction. All processes
// keep all ends open, so that the end of one is not seen in its pipes.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

#include "ferry/engine.hpp"
#include "runtime/support.hpp"

namespace ferry::test {

// One lane. Construct it before the processes are forked.
class ProcessEngine {
 public:
  explicit ProcessEngine(int ranks) : pipes_(std::make_shared<Pipes>(ranks)) {}

  EngineFunctions functions(int rank) const {
    EngineFunctions functions;
    const auto aborted = std::make_shared<std::atomic<bool>>(false);
    functions.all_to_all_v = [pipes = pipes_, aborted, rank](
                                 int, const void* send, const std::int64_t* send_bytes,
                                 const std::int64_t* send_offsets, void* receive,
                                 const std::int64_t* receive_bytes, const std::int64_t* receive_offsets) {
      const int ranks = pipes->ranks;
      std::vector<std::int64_t> sent(ranks, 0), received(ranks, 0);
      for (bool done = false; !done;) {
        done = true;
        bool moved = false;
        for (int peer = 0; peer < ranks; ++peer) {
          const auto* from = static_cast<const char*>(send) + send_offsets[peer];
          auto* to = static_cast<char*>(receive) + receive_offsets[peer];
          moved |= advance(sent[peer], send_bytes[peer], [&](std::int64_t at, std::size_t bytes) {
            return write(pipes->end(rank, peer, 1), from + at, bytes);
          });
          moved |= advance(received[peer], receive_bytes[peer], [&](std::int64_t at, std::size_t bytes) {
            return read(pipes->end(peer, rank, 0), to + at, bytes);
          });
          done &= sent[peer] == send_bytes[peer] && received[peer] == receive_bytes[peer];
        }
        if (*aborted) throw std::runtime_error("aborted");
        if (!moved && !done) sleep_seconds(0.0005);
      }
    };
    functions.abort = [aborted] { *aborted = true; };
    return functions;
  }

 private:
  struct Pipes {
    explicit Pipes(int of_ranks) : ranks(of_ranks), ends(2 * of_ranks * of_ranks) {
      for (int i = 0; i < ranks * ranks; ++i) {
        if (pipe2(&ends[2 * i], O_NONBLOCK | O_CLOEXEC) != 0) throw std::runtime_error("no pipe");
      }
    }
    Pipes(const Pipes&) = delete;
    Pipes& operator=(const Pipes&) = delete;
    ~Pipes() {
      for (const int each : ends) close(each);
    }
    int end(int from, int to, int which) const { return ends[2 * (from * ranks + to) + which]; }

    const int ranks;
    std::vector<int> ends;
  };

  // Moves what is left of `bytes` as far as it goes. Returns whether any bytes have moved.
  template <class Move>
  static bool advance(std::int64_t& done, std::int64_t bytes, const Move& move) {
    if (done == bytes) return false;
    const ssize_t moved = move(done, static_cast<std::size_t>(bytes - done));
    if (moved < 0 && errno != EAGAIN) throw std::runtime_error("a pipe has failed");
    done += std::max<ssize_t>(moved, 0);
    return moved > 0;
  }

  const std::shared_ptr<const Pipes> pipes_;
};

}  // namespace ferry::test
