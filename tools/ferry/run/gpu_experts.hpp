// The experts of one rank at work on its arrivals on a GPU.
#pragma once

#include <cstdint>
#include <vector>

#include "ferry/exchange.hpp"
#include "tools/ferry/common/gpu.hpp"
#include "tools/ferry/run/cublas.hpp"
#include "tools/ferry/run/gpu_expert_kernels.hpp"
#include "tools/ferry/run/run_spec.hpp"

namespace ferry::app {

// The same functions as Experts. Products of SwiGLU take their operands in Job::type and add in fp32; rows
// are read as they lie, but for fp8, whose rows are decoded first, and rank_major, whose rows are picked for
// each expert.
class DeviceExperts {
 public:
  // `rows`: most that may arrive. Everything that is needed lies on the thread's current device from then
  // on, because nothing may be allocated while kernels of other ranks wait for this one.
  DeviceExperts(const Job& job, int rank, std::int64_t rows, const DeviceStream& stream);

  // Of a dispatch that has ended. Work is put on the stream and may still run at return.
  void multiply(const DispatchResult& received);
  void swiglu(const DispatchResult& received);

  Outputs outputs() const { return {.data = outputs_.as(), .type = job_.type}; }

 private:
  // Rows that lie together, of one expert.
  struct Group {
    std::int64_t first, count;
  };

  void bring_weights();
  DeviceRows rows_of(const DispatchResult& received) const;
  DeviceSlots slots_of(const DispatchResult& received) const;
  std::vector<Group> groups_of(const DispatchResult& received) const;
  std::vector<Group> pick(const DispatchResult& received);
  void apply(int local, const void* x, std::int64_t rows, void* out) const;
  std::byte* row(const DeviceArray& rows, std::int64_t index) const {
    return rows.as() + index * job_.row_bytes();
  }

  const Job& job_;
  const std::vector<int>& experts_;  // global ids, in local order
  bool rank_major_;
  const DeviceStream& stream_;
  DeviceMultiply multiply_;
  DeviceArray weights_;             // [local experts] gate, up, down, of Job::type
  DeviceArray factors_;             // [local experts]
  DeviceArray outputs_;             // [rows, hidden] of Job::type
  DeviceArray inputs_;              // [routes, hidden] of Job::type, of rows that are not read as they lie
  DeviceArray gate_, up_, inner_;   // [routes, inner]; the last of Job::type
  DeviceArray routed_;              // rank_major: [routes, hidden] of Job::type, what each expert made
  DeviceArray picked_, positions_;  // rank_major: [routes] row of a route, [rows, top_k] route of a slot
};

}  // namespace ferry::app
