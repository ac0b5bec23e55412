// The arrays of a call, and the rule that an array which a call writes overlaps no other array of the call.
#pragma once

#include <array>
#include <cstdint>

#include "exchange/backend.hpp"

namespace ferry {

// Names of the parts of tokens and of received rows, in messages.
inline constexpr std::array<const char*, kMaxParts> kTokenParts = {"tokens", "part 1 of tokens",
                                                                   "part 2 of tokens", "part 3 of tokens"};
inline constexpr std::array<const char*, kMaxParts> kReceivedParts = {"memory.parts[0]", "memory.parts[1]",
                                                                      "memory.parts[2]", "memory.parts[3]"};

// An array in the caller's or the lane's memory. Names are static strings.
struct CallArray {
  const char* name;
  const void* address;
  std::int64_t rows, row_bytes;
  std::int64_t stride;  // bytes from one row to the next
  bool written;
  bool of_lane;               // arrays of the lane overlap none of each other
  std::uintptr_t begin, end;  // addresses, which add() sets
};

// A number of rows that the host does not know. An array of unknown length counts with its first byte, so
// that two arrays which begin at one address are found, and a rank without rows may pass any two addresses.
inline constexpr std::int64_t kUnknownRows = -1;

// The arrays of one call. Null and empty ones are left out.
class CallArrays {
 public:
  // `rows` or `row_bytes` below 0: of unknown length. `stride`: 0: dense.
  void read(const char* name, const void* address, std::int64_t rows, std::int64_t row_bytes,
            std::int64_t stride = 0) {
    add({name, address, rows, row_bytes, stride, false, false, 0, 0});
  }
  void write(const char* name, const void* address, std::int64_t rows, std::int64_t row_bytes,
             std::int64_t stride = 0) {
    add({name, address, rows, row_bytes, stride, true, false, 0, 0});
  }
  // An array of the lane.
  void write_own(const char* name, const void* address, std::int64_t bytes) {
    add({name, address, 1, bytes, 0, true, true, 0, 0});
  }

  // Throws UsageError if an array that is written shares a byte with another one. Two addresses of the same
  // memory are not found. `call`: what the message begins with; `rank`: this rank, or -1: left out.
  void require_apart(const char* call, int rank) const;

 private:
  void add(CallArray array) {
    if (array.address == nullptr || array.rows == 0 || array.row_bytes == 0) return;
    if (array.rows < 0 || array.row_bytes < 0) array.rows = array.row_bytes = array.stride = 1;
    if (array.stride == 0 || array.stride == array.row_bytes) {
      array.row_bytes *= array.rows;
      array.stride = array.row_bytes;
      array.rows = 1;
    }
    array.begin = reinterpret_cast<std::uintptr_t>(array.address);
    // Unsigned: a stride may be any number.
    array.end = array.begin +
                static_cast<std::uintptr_t>(array.rows - 1) * static_cast<std::uintptr_t>(array.stride) +
                static_cast<std::uintptr_t>(array.row_bytes);
    arrays_[count_++] = array;
  }

  static constexpr int kMost = 2 * kMaxParts + 24;  // of combine_backward
  CallArray arrays_[kMost];                         // the first `count_` are set
  int count_ = 0;
};

// Rows of arrays that a plan gives their length, as far as the host knows.
struct KnownRows {
  std::int64_t tokens = kUnknownRows, total = kUnknownRows;
};

// Each lists the arrays of a checked call. `known`: of its plan.
CallArrays arrays_of(const Config& config, int rank, const DispatchCall& call, const OwnArrays& own,
                     const KnownRows& known);
CallArrays arrays_of(const Config& config, const CombineCall& call, const KnownRows& known);
CallArrays arrays_of(const Config& config, const RouteValuesCall& call, const KnownRows& known);

// The result of a combine and its residual. They may be one array: every value is read before it is written.
void add_result(const char* name, const Result& result, std::int64_t rows, std::int64_t row_bytes,
                const Epilogue& epilogue, CallArrays& arrays);

// The row of `whole` [rows, row_bytes] at which `part` [part_rows, row_bytes] lies; -1: it is not a run of
// these rows.
std::int64_t row_in(const void* whole, std::int64_t rows, const void* part, std::int64_t part_rows,
                    std::int64_t row_bytes);

}  // namespace ferry
