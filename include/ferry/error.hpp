// Errors of Ferry: one hierarchy, every message with the numbers that matter.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace ferry {

enum class ErrorCode : int {
  ok = 0,
  usage = 1,        // the caller's arguments or data are wrong; the exchange stays usable
  overflow = 2,     // routes did not fit the capacity and were dropped; the exchange stays usable
  timeout = 3,      // a peer did not come before the deadline; final for the group
  peer_lost = 4,    // a peer died or left with an error; final for the group
  system = 5,       // the operating system refused something
  unsupported = 6,  // this build, backend or machine cannot do it
};

const char* to_string(ErrorCode code);

class Error : public std::runtime_error {
 public:
  ErrorCode code() const noexcept { return code_; }

 protected:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}

 private:
  ErrorCode code_;
};

class UsageError : public Error {
 public:
  explicit UsageError(const std::string& message) : Error(ErrorCode::usage, message) {}
};

// An expert id outside [-1, experts). The slot was skipped, everything else was carried.
struct BadId {
  int rank = -1, token = -1, slot = -1;  // the lowest (token, slot) of the call
  std::int64_t id = 0;
  std::int64_t count = 0;  // how many ids of the call were bad
};

class BadIdError : public UsageError {
 public:
  BadIdError(const std::string& message, const BadId& found) : UsageError(message), bad(found) {}
  const BadId bad;
};

// A plan or source map whose entries point outside the exchange: the entries were skipped.
struct BadSource {
  int rank = -1;            // the rank that found it
  std::int64_t index = -1;  // lowest index of the table it stood in
  std::int64_t count = 0;
};

class BadSourceError : public UsageError {
 public:
  BadSourceError(const std::string& message, const BadSource& found) : UsageError(message), bad(found) {}
  const BadSource bad;
};

// Routes past the capacity were dropped in row order. Every rank raises the same numbers.
struct Overflow {
  int rank = -1;              // the rank that needs the most rows
  std::int64_t capacity = 0;  // rows it has (`expert_padded`: rows an expert)
  std::int64_t needed = 0;    // rows it would have needed
  std::int64_t dropped = 0;   // routes dropped on all ranks together (`rank_major`: rows)
};

class OverflowError : public Error {
 public:
  OverflowError(const std::string& message, const Overflow& found)
      : Error(ErrorCode::overflow, message), overflow(found) {}
  const Overflow overflow;
};

enum class Operation : int {
  none = 0,
  construct = 1,
  dispatch = 2,
  combine = 3,
  metadata = 4,
  route_values = 5,
  barrier = 6,
};

const char* to_string(Operation operation);

// Who waited for whom when a wait ended without its flag.
struct WaitRecord {
  Operation operation = Operation::none;
  std::uint64_t call = 0;      // call number of the lane
  int rank = -1;               // the rank that waited
  int peer = -1;               // the rank that was missing
  std::uint64_t expected = 0;  // the flag value waited for: a call number, or a chunk of the call
  std::uint64_t seen = 0;      // the value last seen
};

std::string describe(const WaitRecord& record);

class TimeoutError : public Error {
 public:
  TimeoutError(const std::string& message, const WaitRecord& found)
      : Error(ErrorCode::timeout, message), record(found) {}
  const WaitRecord record;
};

class PeerLostError : public Error {
 public:
  PeerLostError(const std::string& message, const WaitRecord& found)
      : Error(ErrorCode::peer_lost, message), record(found) {}
  const WaitRecord record;
};

class SystemError : public Error {
 public:
  SystemError(const std::string& message, int code_of_system)
      : Error(ErrorCode::system, message), error_number(code_of_system) {}
  const int error_number;  // errno
};

class UnsupportedError : public Error {
 public:
  explicit UnsupportedError(const std::string& message) : Error(ErrorCode::unsupported, message) {}
};

}  // namespace ferry
