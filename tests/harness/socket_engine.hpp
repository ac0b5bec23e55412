// An engine between forked processes: a pair of sockets for each pair of ranks. After close_but() a rank that
// dies closes its ends, and the transfers of the others throw.
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "ferry/engine.hpp"

namespace ferry::test {

class SocketEngine {
 public:
  // Construct it before the processes are forked.
  explicit SocketEngine(int ranks)
      : ranks_(ranks), ends_(static_cast<std::size_t>(ranks) * static_cast<std::size_t>(ranks), -1) {
    for (int a = 0; a < ranks; ++a) {
      for (int b = a + 1; b < ranks; ++b) {
        int both[2];
        if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, both) != 0)
          throw std::runtime_error("socketpair failed");
        end(a, b) = both[0];
        end(b, a) = both[1];
      }
    }
  }
  ~SocketEngine() { close_but(-1); }
  SocketEngine(const SocketEngine&) = delete;
  SocketEngine& operator=(const SocketEngine&) = delete;

  // Closes the ends of all ranks but `rank`, -1: of all, so that theirs are the only ones.
  void close_but(int rank) {
    for (int a = 0; a < ranks_; ++a) {
      for (int b = 0; b < ranks_; ++b) {
        if (a == rank || end(a, b) < 0) continue;
        close(end(a, b));
        end(a, b) = -1;
      }
    }
  }

  // The functions of one rank, called in its process. The engine must outlive them.
  EngineFunctions functions(int rank) {
    EngineFunctions functions;
    functions.all_to_all_v =
        [this, rank](int, const void* send, const std::int64_t* send_bytes, const std::int64_t* send_offsets,
                     void* receive, const std::int64_t* receive_bytes, const std::int64_t* receive_offsets) {
          std::vector<Transfer> transfers;
          for (int peer = 0; peer < ranks_; ++peer) {
            if (peer == rank) continue;
            transfers.push_back({end(rank, peer), static_cast<const char*>(send) + send_offsets[peer],
                                 send_bytes[peer], static_cast<char*>(receive) + receive_offsets[peer],
                                 receive_bytes[peer]});
          }
          while (advance(transfers)) {
            if (aborted_) throw std::runtime_error("aborted");
            wait(transfers);
          }
        };
    functions.abort = [this] { aborted_ = true; };
    return functions;
  }

 private:
  struct Transfer {
    int socket;
    const char* send;
    std::int64_t to_send;
    char* receive;
    std::int64_t to_receive;
  };

  static constexpr int kPollMs = 1;  // between looks at `aborted_`

  int& end(int rank, int peer) { return ends_[static_cast<std::size_t>(rank * ranks_ + peer)]; }

  // Moves what can be moved; false: everything has been.
  static bool advance(std::vector<Transfer>& transfers) {
    bool missing = false;
    for (Transfer& one : transfers) {
      if (one.to_send > 0) {
        const ssize_t sent =
            ::send(one.socket, one.send, static_cast<std::size_t>(one.to_send), MSG_NOSIGNAL);
        if (sent < 0 && errno != EAGAIN) throw std::runtime_error("a peer has closed its socket");
        one.send += sent > 0 ? sent : 0;
        one.to_send -= sent > 0 ? sent : 0;
      }
      if (one.to_receive > 0) {
        const ssize_t received = ::recv(one.socket, one.receive, static_cast<std::size_t>(one.to_receive), 0);
        if (received == 0 || (received < 0 && errno != EAGAIN))
          throw std::runtime_error("a peer has closed its socket");
        one.receive += received > 0 ? received : 0;
        one.to_receive -= received > 0 ? received : 0;
      }
      missing |= one.to_send > 0 || one.to_receive > 0;
    }
    return missing;
  }

  static void wait(const std::vector<Transfer>& transfers) {
    std::vector<pollfd> sockets;
    for (const Transfer& one : transfers) {
      const short events =
          static_cast<short>((one.to_send > 0 ? POLLOUT : 0) | (one.to_receive > 0 ? POLLIN : 0));
      if (events != 0) sockets.push_back({one.socket, events, 0});
    }
    poll(sockets.data(), sockets.size(), kPollMs);
  }

  const int ranks_;
  std::vector<int> ends_;              // [rank][peer]
  std::atomic<bool> aborted_ = false;  // in this process
};

}  // namespace ferry::test
