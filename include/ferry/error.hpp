// The exceptions that Ferry throws. Each message names the offending values; records hold them as numbers.
//
//   Error
//     UsageError            bad argument or data
//       BadIdError          expert ids out of range; the other slots were delivered
//       BadSourceError      damaged entries in a plan; the other rows were delivered
//     OverflowError         more rows than the capacity; the rows that fit were delivered
//     TimeoutError          a peer missed the deadline; final for the group
//     PeerLostError         a peer died or left with an error; final for the group
//     SystemError           the operating system refused a request
//     UnsupportedError      not possible in this build or on this machine
//
// After a UsageError or an OverflowError the exchange stays usable.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace ferry {

/// The class of an Error as a number. The C interface returns the same numbers as ferry_status.
enum class ErrorCode : int {
  ok = 0,
  usage = 1,        ///< the caller's arguments or data are wrong; the exchange stays usable
  overflow = 2,     ///< routes exceeded the capacity and were dropped; the exchange stays usable
  timeout = 3,      ///< a peer missed the deadline; final for the group
  peer_lost = 4,    ///< a peer died or left with an error; final for the group
  system = 5,       ///< the operating system refused a request, such as memory
  unsupported = 6,  ///< this build, backend or machine cannot do it
};

/// Name as written above, with a space for "peer lost"; "unknown" for other numbers. Static string.
const char* to_string(ErrorCode code);

/// Base of every exception that Ferry throws.
class Error : public std::runtime_error {
 public:
  ErrorCode code() const noexcept { return code_; }

 protected:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}

 private:
  ErrorCode code_;
};

/// The caller's arguments or data are wrong. When one rank refuses a call, its peers' call of that number
/// ends with the same error. The exchange stays usable.
class UsageError : public Error {
 public:
  explicit UsageError(const std::string& message) : Error(ErrorCode::usage, message) {}
};

/// Expert ids outside [-1, E) in a dispatch. Their slots were skipped; everything else was delivered.
struct BadId {
  int rank = -1, token = -1, slot = -1;  ///< the first bad id: lowest token, then lowest slot
  std::int64_t id = 0;                   ///< the id found there
  std::int64_t count = 0;                ///< bad ids of the call
};

/// Raised on the rank that passed the bad ids, and on no other.
class BadIdError : public UsageError {
 public:
  BadIdError(const std::string& message, const BadId& found) : UsageError(message), bad(found) {}
  const BadId bad;
};

/// Entries of a plan that point outside the exchange. They were skipped; everything else was delivered.
struct BadSource {
  int rank = -1;            ///< the rank whose plan it is
  std::int64_t index = -1;  ///< the lowest index of a bad entry in its table
  std::int64_t count = 0;   ///< bad entries found
};

/// Raised on the rank whose plan is damaged.
class BadSourceError : public UsageError {
 public:
  BadSourceError(const std::string& message, const BadSource& found) : UsageError(message), bad(found) {}
  const BadSource bad;
};

/// Routes, or rows of shared experts, that did not fit a rank's capacity. They were dropped, the last rows of
/// the order first. Or rows that did not fit a rank's ReceiveBuffers::rows.
struct Overflow {
  int rank = -1;  ///< the rank that needs the most rows, among those that overflowed
  /// Rows that rank `rank` has (expert_padded: rows of one expert), or its ReceiveBuffers::rows.
  std::int64_t capacity = 0;
  std::int64_t needed = 0;  ///< rows that it would have needed, padding included
  /// Routes and shared rows dropped on all ranks together (rank_major: rows), and rows past
  /// ReceiveBuffers::rows, padding included.
  std::int64_t dropped = 0;
};

/// Raised on every rank with the same numbers.
class OverflowError : public Error {
 public:
  OverflowError(const std::string& message, const Overflow& found)
      : Error(ErrorCode::overflow, message), overflow(found) {}
  const Overflow overflow;
};

/// The operation in which a rank waited.
enum class Operation : int {
  none = 0,
  construct = 1,  ///< constructing a group or an exchange
  dispatch = 2,
  combine = 3,
  metadata = 4,
  route_values = 5,
  barrier = 6,
  dispatch_counts = 7,
  all_gather_v = 8,
  reduce_scatter_v = 9,
  return_values = 10,
};

/// Name as written above; "unknown" for other numbers. Static string.
const char* to_string(Operation operation);

/// The role of a rank in two hops when its wait ended.
enum class WaitRole : int {
  none = 0,      ///< one hop, a wait for call headers, or not known
  sender = 1,    ///< sent its own messages, and waited for room
  relay = 2,     ///< passed on messages of other ranks, or added rows
  receiver = 3,  ///< waited for messages to itself
};

/// Name as written above; "unknown" for other numbers. Static string.
const char* to_string(WaitRole role);

/// A wait that ended without success: who waited for whom, and for which flag value.
struct WaitRecord {
  Operation operation = Operation::none;
  std::uint64_t call = 0;          ///< call number of the lane
  int rank = -1;                   ///< the rank that waited
  int peer = -1;                   ///< the rank that it waited for; -1: any of them
  std::uint64_t expected = 0;      ///< flag value it waited for: a call number, or a chunk of the call
  std::uint64_t observed = 0;      ///< flag value it last read
  int via = -1;                    ///< the relay that forwards what it waited for; -1: none
  WaitRole role = WaitRole::none;  ///< of rank `rank`
  int node = -1;  ///< of `peer`, or if that is -1 of `via`; -1: not known, or the group has one node
};

/// One line: "rank 0 waited for rank 1 in dispatch 2 (expected 2, observed 1)"; in two hops also "rank 0, as
/// relay, waited for rank 1 on node 1".
std::string describe(const WaitRecord& record);

/// A peer did not reach the expected point before the deadline. Final for the group.
class TimeoutError : public Error {
 public:
  TimeoutError(const std::string& message, const WaitRecord& found)
      : Error(ErrorCode::timeout, message), record(found) {}
  const WaitRecord record;
};

/// A peer died, or left the group with an error. Final for the group.
class PeerLostError : public Error {
 public:
  PeerLostError(const std::string& message, const WaitRecord& found)
      : Error(ErrorCode::peer_lost, message), record(found) {}
  const WaitRecord record;
};

/// The operating system refused a request.
class SystemError : public Error {
 public:
  SystemError(const std::string& message, int system_error_number)
      : Error(ErrorCode::system, message), error_number(system_error_number) {}
  const int error_number;  ///< errno
};

/// This build, backend or machine cannot do what was requested.
class UnsupportedError : public Error {
 public:
  explicit UnsupportedError(const std::string& message) : Error(ErrorCode::unsupported, message) {}
};

}  // namespace ferry
