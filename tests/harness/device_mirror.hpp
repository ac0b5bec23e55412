// What stands between a test's memory and a device backend: pointers as the call is to be given them, and
// host copies of what it left in device memory. For host backends all of it passes through.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "ferry/exchange.hpp"
#include "harness/guarded_buffer.hpp"
#include "harness/device.hpp"

namespace ferry::contract {

class CallMemory {
 public:
  explicit CallMemory(bool on_device = false) : on_device_(on_device) {}

  // A new call: what the last one was given is forgotten.
  void begin();

  // Every argument of the call goes through one of these. Blocks with a twin are copied to it.
  template <class T>
  T* given(T* pointer) {
    return static_cast<T*>(const_cast<void*>(give(pointer)));
  }
  Tokens given(Tokens tokens);
  Ids given(Ids ids);
  Plan given(const Plan& plan);
  DispatchOptions given(DispatchOptions options);
  Outputs given(Outputs outputs);
  Result given(Result result);
  CombineOptions given(CombineOptions options);

  // Before a receive half: twins are filled again, with what the test has made of its memory since.
  void refresh();

  // After the call: twins are read back.
  void bring_back();

  // The same arrivals in host memory. Copies live until the next ones are made; given to a call, they stand
  // for the originals. `rows` is the most there can be, in all groups together.
  DispatchResult on_host(const DispatchResult& received, const Config& config, const Format& format,
                         std::int64_t rows);

 private:
  const void* give(const void* pointer);
  const void* host_copy(const void* pointer, std::int64_t bytes);

  template <class T>
  void bring(T*& pointer, std::int64_t count) {
    pointer = static_cast<T*>(const_cast<void*>(host_copy(pointer, count * std::int64_t{sizeof(T)})));
  }

  bool on_device_;
  std::vector<device::Block> blocks_;             // that the call was given
  std::vector<Buffer> plans_;                     // given ones that lay where no device reaches
  std::map<const void*, const void*> originals_;  // of host copies
  std::vector<Buffer> copies_;
};

}  // namespace ferry::contract
