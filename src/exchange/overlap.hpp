// The arrays of a call, and the rule that an array which a call writes overlaps no other array of the call.
#pragma once

#include <cstdint>

#include "exchange/backend.hpp"
#include "exchange/checks.hpp"

namespace ferry {

// An array in the caller's or the lane's memory. Names are static strings.
struct CallArray {
  const char* name;
  const void* address;
  std::int64_t rows, row_bytes;
  std::int64_t stride;  // bytes from one row to the next
  bool written;
  bool of_lane;  // arrays of the lane overlap none of each other
};

// The arrays of one call. Null and empty ones are left out.
class CallArrays {
 public:
  // `stride`: 0: dense.
  void read(const char* name, const void* address, std::int64_t rows, std::int64_t row_bytes,
            std::int64_t stride = 0) {
    add({name, address, rows, row_bytes, stride, false, false});
  }
  void write(const char* name, const void* address, std::int64_t rows, std::int64_t row_bytes,
             std::int64_t stride = 0) {
    add({name, address, rows, row_bytes, stride, true, false});
  }
  // An array of the lane.
  void write_own(const char* name, const void* address, std::int64_t bytes) {
    add({name, address, 1, bytes, 0, true, true});
  }

  // Throws UsageError if an array that is written shares a byte with another one. Two addresses of the same
  // memory are not found. `call`: its name in messages; `rank`: this rank, or -1: left out.
  void require_apart(const char* call, int rank) const;

 private:
  void add(CallArray array) {
    if (array.address == nullptr || array.rows <= 0 || array.row_bytes <= 0) return;
    if (array.stride == 0 || array.stride == array.row_bytes) {
      array.row_bytes *= array.rows;
      array.stride = array.row_bytes;
      array.rows = 1;
    }
    arrays_[count_++] = array;
  }

  static constexpr int kMost = 2 * kMaxParts + 24;  // of combine_backward
  CallArray arrays_[kMost];                         // the first `count_` are set
  int count_ = 0;
};

// Each lists the arrays of a checked call. Where only the device knows how many rows an array has, it has one
// here.
CallArrays arrays_of(const Config& config, int rank, const DispatchCall& call, const OwnArrays& own,
                     PlanIn plan_in);
CallArrays arrays_of(const Config& config, const CombineCall& call, PlanIn plan_in);
CallArrays arrays_of_route_values(const Config& config, const float* values, const Plan& plan,
                                  const float* row_values, PlanIn plan_in);

// The row of `whole` [rows, row_bytes] at which `part` [part_rows, row_bytes] lies; -1: it is not a run of
// these rows.
std::int64_t row_in(const void* whole, std::int64_t rows, const void* part, std::int64_t part_rows,
                    std::int64_t row_bytes);

}  // namespace ferry
