// Lets tests written for host memory call a device backend.
//
// Tests keep inputs and outputs in GuardedBuffers. With FERRY_TEST_MEMORY=device each buffer has a mirror in
// device memory: arguments are translated to it and its contents uploaded before the call, and downloaded
// afterwards. For host backends every function returns its argument unchanged.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "ferry/exchange.hpp"
#include "format/parts.hpp"
#include "harness/device.hpp"
#include "harness/guarded_buffer.hpp"

namespace ferry::contract {

class DeviceMirror {
 public:
  explicit DeviceMirror(bool on_device = false) : on_device_(on_device) {}

  // Starts a call: forgets the arguments of the last one.
  void begin();

  // Translates an argument of the call. On first use, uploads the block it points into.
  template <class T>
  T* translate(T* pointer) {
    return static_cast<T*>(const_cast<void*>(device_pointer(pointer)));
  }
  Tokens translate(Tokens tokens);
  Ids translate(Ids ids);
  Plan translate(const Plan& plan);
  DispatchOptions translate(DispatchOptions options);
  Outputs translate(Outputs outputs);
  Result translate(Result result);
  CombineOptions translate(CombineOptions options);

  // Uploads again, before a receive phase: the test may have changed its memory since the send phase.
  void upload();

  // Copies every mirror back to its buffer, after the call.
  void download();

  // Copies a result to host memory. The copies live until the next to_host(); passed to a call, they are
  // translated back to the originals. `rows`: capacity of all groups together.
  DispatchResult to_host(const DispatchResult& received, const Config& config, const PartList& parts,
                         std::int64_t rows);

 private:
  const void* device_pointer(const void* pointer);
  const void* host_copy(const void* pointer, std::int64_t bytes);

  template <class T>
  void replace_by_host_copy(T*& pointer, std::int64_t count) {
    pointer = static_cast<T*>(const_cast<void*>(host_copy(pointer, count * std::int64_t{sizeof(T)})));
  }

  bool on_device_;
  std::vector<device::Block> blocks_;             // blocks that arguments of this call point into
  std::vector<GuardedBuffer> plans_;              // copies of plans whose storage no device can access
  std::map<const void*, const void*> originals_;  // from host copy to device memory
  std::vector<GuardedBuffer> copies_;
};

}  // namespace ferry::contract
