// The server of `ferry launch`, at which the ranks that it has started find each other.
#pragma once

#include <poll.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/descriptors.hpp"

namespace ferry::app {

// Answers the collectives of group/bootstrap_link.hpp. One thread; it works only inside serve(), which never
// waits.
class MeetingPoint {
 public:
  // Throws SystemError.
  explicit MeetingPoint(int ranks) : connections_(static_cast<std::size_t>(ranks)) {}

  const SocketAddress& address() const { return newcomers_.address(); }  // for the ranks' environment

  // Adds the descriptors that serve() needs to those that the caller polls.
  void add_to(std::vector<pollfd>& entries) const;

  // Serves every connection and message that has arrived. Throws SystemError if this process cannot have more
  // files open.
  void serve();

  // Collectives that need the rank end with this text from now on.
  void set_lost(int rank, const std::string& why);

 private:
  struct Connection {
    FileDescriptor socket{};
    std::vector<std::byte> input{};                          // received and not answered yet
    std::shared_ptr<const std::vector<std::byte>> answer{};  // being sent; null: none
    std::size_t sent = 0;                                    // bytes of it

    std::optional<std::size_t> announced() const;  // bytes of its part in the pending collective
    bool complete() const;                         // they are all there
  };

  void connect_newcomers();
  static void read(Connection& connection);
  static void send(Connection& connection);
  void answer_if_complete();

  DescriptorSocket newcomers_;
  std::vector<Connection> connections_;  // [ranks], without a socket: the rank has none
  std::string lost_;                     // why a rank will not call any more; empty: all may
};

}  // namespace ferry::app
