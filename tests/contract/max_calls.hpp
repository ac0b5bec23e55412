// MAX's calls as the contract tests make them: with arrays in host memory on every backend.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "ferry/max.hpp"
#include "harness/guarded_buffer.hpp"
#include "harness/test_case.hpp"

namespace ferry::contract {

// A case whose arrays and options MAX's calls have.
TestCase max_case(TestCase c, int ranks, int shared_experts, Reduction reduction);

// A copy of a max::DispatchResult in host memory, apart from the rows in host memory. The tests change it.
struct MaxArrays {
  const void* output_tokens = nullptr;
  std::array<ReceivedPart, kMaxParts> parts{};
  const std::int32_t* tile_offsets = nullptr;
  std::vector<std::uint32_t> row_offsets;
  std::vector<std::int32_t> expert_ids;
  std::array<std::uint32_t, 2> expert_usage_stats{};
  std::vector<std::int32_t> src_info, counts;

  MaxArrays() = default;
  MaxArrays(const max::DispatchResult& received);  // NOLINT(google-explicit-constructor): of host memory
  operator max::DispatchResult() const;            // NOLINT(google-explicit-constructor)
};

// max::Exchange. On a device backend each call copies its arguments to memory that the device can access, and
// waits; what it returns is copied to host memory.
class MaxCalls {
 public:
  MaxCalls(const Rank& rank, const Config& config);
  ~MaxCalls();

  const Config& config() const { return exchange_.config(); }
  const Rank& rank() const { return exchange_.rank(); }

  void ep_dispatch_async(const Tokens& tokens, const Ids& topk_ids, const max::DispatchOptions& options = {});
  MaxArrays ep_dispatch_wait(int lane = 0);
  MaxArrays ep_fused_dispatch(const Tokens& tokens, const Ids& topk_ids,
                              const max::DispatchOptions& options = {});
  void ep_combine_async(const max::CombineInput& input, const max::CombineOutput& output, int lane = 0);
  void ep_combine_wait(int lane = 0);
  void ep_fused_combine(const max::CombineInput& input, const max::CombineOutput& output, int lane = 0);

 private:
  // Memory of a device's call, kept until the call has ended.
  struct DeviceCall;

  Stream stream() const;
  CallOptions call_of(int index) const { return {.lane = index, .stream = stream()}; }
  DeviceCall& lane(int index) { return *calls_[static_cast<std::size_t>(index)]; }
  void upload_dispatch(const Tokens& tokens, const Ids& topk_ids, const max::DispatchOptions& options,
                       DeviceCall& call) const;
  void upload_combine(const max::CombineInput& input, const max::CombineOutput& output,
                      DeviceCall& call) const;
  void download_results(int index);
  MaxArrays download(const max::DispatchResult& received, int index);

  max::Exchange exchange_;
  std::vector<std::unique_ptr<DeviceCall>> calls_;  // none in host memory
};

}  // namespace ferry::contract
