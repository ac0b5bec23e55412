// The server of `ferry launch`, at which the ranks that it has started find each other.
#pragma once

#include <poll.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/os/file_descriptor.hpp"

namespace ferry::app {

// Answers the collectives of group/launch_protocol.hpp. One thread; it works only inside serve().
class MeetingPoint {
 public:
  // Throws SystemError.
  explicit MeetingPoint(int ranks);
  ~MeetingPoint();
  MeetingPoint(const MeetingPoint&) = delete;
  MeetingPoint& operator=(const MeetingPoint&) = delete;

  const std::string& name() const { return name_; }  // for the ranks' environment

  // Adds the descriptors that serve() needs to those that the caller polls.
  void add_to(std::vector<pollfd>& entries) const;

  // Serves every connection and message that has arrived. Does not wait.
  void serve();

  // Collectives that need the rank end with this text from now on.
  void set_lost(int rank, const std::string& why);

 private:
  struct Connection;

  void accept_all();
  void read(Connection& connection);
  void answer_if_complete();
  static void send_to(Connection& connection, bool failed, const void* data, std::size_t bytes);

  int ranks_;
  std::string name_;
  FileDescriptor listener_;
  std::vector<std::unique_ptr<Connection>> connections_;
  std::string lost_;  // why a rank will not call any more; empty: all may
};

}  // namespace ferry::app
