// The device of an exchange, as the evaluator of programs uses it besides calls: streams, events, memory and
// copies of rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "ferry/exchange.hpp"

namespace ferry {

// Rows that are each followed by guard bytes.
struct GuardedRows {
  std::byte* first;
  std::int64_t row_bytes, stride, guard_bytes;  // no guard bytes: nothing to do
  std::int64_t rows;
};
// A row behind which a guard byte has been overwritten.
struct BrokenGuard {
  int part;
  std::int64_t row;
};

// Sums of rows, dense, of one type: row t of `result` is the sum in fp32, from +0 and in the order of
// `terms`, of the rows that terms[t, ...] names, rounded once.
struct ListedSums {
  const void* rows;           // [.., hidden]
  const std::int32_t* terms;  // [count, most] numbers of rows; -1: none
  int most;
  void* result;  // [count, hidden], aligned to 16 bytes
  std::int64_t count, hidden;
  DType type;
};

// On the device of one exchange. Owns the streams, events and memory that it makes; the destructor waits for
// the work on them.
class DeviceWork {
 public:
  virtual ~DeviceWork() = default;

  virtual Stream make_stream() = 0;
  virtual int make_event() = 0;  // a number for record() and wait()
  // Zeroed, aligned to 256 bytes. Throws SystemError.
  virtual std::byte* allocate(std::int64_t bytes) = 0;

  // Enqueued on `stream`; also captured.
  virtual void record(int event, Stream stream) = 0;
  virtual void wait(int event, Stream stream) = 0;  // for the work before the last record() of the event
  // To dense rows.
  virtual void copy_rows(void* to, const void* from, std::int64_t from_stride, std::int64_t row_bytes,
                         std::int64_t rows, Stream stream) = 0;
  virtual void set_number(std::int32_t* to, std::int32_t number, Stream stream) = 0;
  virtual void add_rows(const ListedSums& sums, Stream stream) = 0;

  // Copies between memory of the host and of the device, and returns when it is done.
  virtual void copy(void* to, const void* from, std::int64_t bytes) = 0;
  // Throws UsageError if kernels cannot use the memory at `address`, or it is not a multiple of 16 bytes.
  virtual void require_usable(const char* operation, const char* name, const void* address) = 0;

  virtual bool is_captured(Stream stream) const = 0;

  // Guard bytes (encoder_staging.hpp). check_guards() notes an overwritten one for the lane, and
  // take_broken_guard() returns and forgets it, after the lane's work has ended.
  virtual void prepare_guards(int lanes) = 0;
  virtual void fill_guards(const GuardedRows& rows, int value, Stream stream) = 0;
  virtual void check_guards(const GuardedRows& rows, int value, int lane, int part, Stream stream) = 0;
  virtual std::optional<BrokenGuard> take_broken_guard(int lane) = 0;
};

// Null: an exchange of host memory.
std::unique_ptr<DeviceWork> make_device_work(const Exchange& exchange);

// Whether calls of the exchange may be captured into a CUDA graph.
bool can_be_captured(const Exchange& exchange);

}  // namespace ferry
