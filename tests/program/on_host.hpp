// Programs on device memory whose functions are those of host memory: inputs that devices can read, functions
// that copy, and results copied back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <utility>
#include <vector>

#include "ferry/evaluator.hpp"
#include "harness/device.hpp"
#include "program/eager_run.hpp"

namespace ferry::contract {

// Bytes of a row of the tests' programs, which are in fp32.
inline std::int64_t row_bytes_of(const ProgramValue& value, const Config& config) {
  if (value.kind == ValueKind::tokens || value.kind == ValueKind::outputs) return 4 * kHidden;
  return value.kind == ValueKind::ids || value.kind == ValueKind::weights ? 4 * config.top_k : 0;
}

// Runs a function for host memory on values in device memory: waits for the step's stream, and copies.
class OnHost {
 public:
  OnHost(ProgramFunction function, const Config& config) : function_(std::move(function)), config_(config) {}

  void operator()(ProgramInputs inputs, ProgramOutputs outputs, Stream stream) const {
    device::wait(stream);
    Copies copies;
    std::vector<ProgramValue> taken, given;
    for (const ProgramValue* const input : inputs) taken.push_back(copies.of(*input, config_));
    for (const ProgramValue* const output : outputs) given.push_back(copies.room_for(*output, config_));
    std::vector<const ProgramValue*> from;
    std::vector<ProgramValue*> to;
    for (const ProgramValue& value : taken) from.push_back(&value);
    for (ProgramValue& value : given) to.push_back(&value);
    function_(from, to);
    for (std::size_t i = 0; i < given.size(); ++i) {
      outputs[i]->device_count = nullptr;  // the count is a number
      outputs[i]->count = given[i].count;
      const std::int64_t bytes = given[i].rows * row_bytes_of(given[i], config_);
      if (bytes > 0) device::copy(outputs[i]->data, given[i].data, bytes);
    }
  }

 private:
  // The values in host memory, until the function has ended.
  class Copies {
   public:
    ProgramValue of(const ProgramValue& value, const Config& config) {
      ProgramValue copy = value;
      if (value.kind == ValueKind::received) {
        DispatchResult& rows = copy.received;
        const bool padded = config.layout == Layout::expert_padded;
        rows.data = copied(rows.data, rows.capacity * (padded ? rows.groups : 1) * 4 * kHidden);
        rows.counts = static_cast<std::int32_t*>(copied(rows.counts, std::int64_t{4} * rows.groups));
        rows.row_offsets =
            static_cast<std::int32_t*>(copied(rows.row_offsets, std::int64_t{4} * (rows.groups + 1)));
        rows.group_expert =
            static_cast<std::int32_t*>(copied(rows.group_expert, std::int64_t{4} * rows.groups));
      } else {
        copy.data = copied(value.data, value.rows * row_bytes_of(value, config));
      }
      return copy;
    }
    ProgramValue room_for(const ProgramValue& value, const Config& config) {
      ProgramValue made = value;
      made.data =
          bytes_.emplace_back(static_cast<std::size_t>(value.rows * row_bytes_of(value, config) + 1)).data();
      return made;
    }

   private:
    void* copied(const void* device, std::int64_t bytes) {
      std::vector<std::byte>& copy = bytes_.emplace_back(static_cast<std::size_t>(bytes) + 1);
      if (bytes > 0) device::copy(copy.data(), device, bytes);
      return copy.data();
    }
    std::deque<std::vector<std::byte>> bytes_;
  };

  ProgramFunction function_;
  Config config_;
};

inline ProgramFunctions on_host(const ProgramFunctions& functions, const Config& config) {
  ProgramFunctions made;
  for (const auto& [name, function] : functions) made[name] = OnHost(function, config);
  return made;
}

// A rank's inputs in pinned memory.
class PinnedInputs {
 public:
  explicit PinnedInputs(const RankInputs& inputs) : inputs_(inputs) {}
  ~PinnedInputs() {
    for (std::byte* const block : blocks_) device::release(block);
  }
  PinnedInputs(const PinnedInputs&) = delete;
  PinnedInputs& operator=(const PinnedInputs&) = delete;

  std::vector<ProgramValue> values() {
    std::vector<ProgramValue> made = inputs_.values();
    made[0].data = pinned(inputs_.x);
    made[1].data = pinned(inputs_.ids);
    made[2].data = pinned(inputs_.weights);
    return made;
  }

 private:
  template <class T>
  void* pinned(const std::vector<T>& values) {
    const auto bytes = static_cast<std::int64_t>(values.size() * sizeof(T));
    std::byte* const block = blocks_.emplace_back(device::allocate(bytes + 16));
    if (bytes > 0) std::memcpy(block, values.data(), static_cast<std::size_t>(bytes));
    return block;
  }

  const RankInputs& inputs_;
  std::vector<std::byte*> blocks_;
};

// The rows of a result in device memory, and its metadata, as values in host memory.
class ResultOnHost {
 public:
  // `rows`: of them; of rows of all ranks in device memory there is only room for more.
  ResultOnHost(const ProgramValue& value, std::int64_t rows, const Config& config) : value_(value) {
    if (value.kind == ValueKind::metadata) {
      device::copy(&value_.metadata, value.device_metadata, sizeof(StepMetadata));
      return;
    }
    bytes_.resize(static_cast<std::size_t>(rows * row_bytes_of(value, config)));
    if (!bytes_.empty()) device::copy(bytes_.data(), value.data, static_cast<std::int64_t>(bytes_.size()));
    value_.data = bytes_.data();
    value_.rows = rows;
  }
  const ProgramValue& value() const { return value_; }

 private:
  ProgramValue value_;
  std::vector<std::byte> bytes_;
};

}  // namespace ferry::contract
