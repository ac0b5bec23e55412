// Copies and compares many arrays of device memory in one launch, so that tests can check every call without
// waiting for it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace ferry::contract {

// Pairs of arrays in device memory. A null `from` stands for kPoison.
struct ArrayPairs {
  static constexpr int kMost = 16;
  struct Pair {
    std::byte* to;
    const std::byte* from;
    std::int64_t bytes;
  };

  Pair pair[kMost] = {};
  int count = 0;

  void add(void* to, const void* from, std::int64_t bytes);
};

// Enqueues copying every `from` to its `to`.
void copy_arrays(const ArrayPairs& pairs, cudaStream_t stream);

struct DifferenceRecord;

// Counts differences on the current device.
class DeviceComparison {
 public:
  DeviceComparison();
  ~DeviceComparison();
  DeviceComparison(const DeviceComparison&) = delete;
  DeviceComparison& operator=(const DeviceComparison&) = delete;

  // Enqueues comparing every `to` with its `from`. `call` names these pairs in the message.
  void compare(const ArrayPairs& pairs, std::int64_t call, cudaStream_t stream);

  // Waits for the stream. Throws Mismatch if any comparison so far found a difference: it names one of them.
  // `arrays`: the name of each pair.
  void require_no_difference(cudaStream_t stream, const std::vector<std::string>& arrays) const;

  std::int64_t compared() const { return compared_; }  // calls of compare()

 private:
  DifferenceRecord* record_ = nullptr;  // on the device
  std::int64_t compared_ = 0;
};

}  // namespace ferry::contract
