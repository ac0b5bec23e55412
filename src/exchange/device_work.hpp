// What the evaluator of programs needs of a device besides the calls of an exchange: streams, events, memory
// and copies of rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "ferry/exchange.hpp"

namespace ferry {

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
  virtual void copy_rows(void* to, std::int64_t to_stride, const void* from, std::int64_t from_stride,
                         std::int64_t row_bytes, std::int64_t rows, Stream stream) = 0;
  virtual void set_number(std::int32_t* to, std::int32_t number, Stream stream) = 0;

  virtual bool is_captured(Stream stream) const = 0;
};

// Null: an exchange of host memory.
std::unique_ptr<DeviceWork> make_device_work(const Exchange& exchange);

// Whether calls of the exchange may be captured into a CUDA graph.
bool can_be_captured(const Exchange& exchange);

}  // namespace ferry
