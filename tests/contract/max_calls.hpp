// MAX's calls as the contract tests make them: with arrays in host memory on every backend.
#pragma once

#include <memory>
#include <vector>

#include "ferry/max_device.hpp"
#include "harness/guarded_buffer.hpp"
#include "harness/test_case.hpp"

namespace ferry::contract {

// A case whose arrays and options MAX's calls have.
TestCase max_case(TestCase c, int ranks, int shared_experts, Reduction reduction);

// Why tests of MAX's calls are skipped with two hops on the backend cuda.
inline constexpr const char* kMaxTakesOneHop = "MAX's calls take one hop on the backend cuda";

// max::Exchange. On a device backend max::DeviceExchange: each call copies its arguments to memory that the
// device can access, and waits; what it returns is copied to host memory.
class MaxCalls {
 public:
  MaxCalls(const Rank& rank, const Config& config);
  ~MaxCalls();

  const Config& config() const { return device_ ? device_->config() : host_->config(); }
  const Rank& rank() const { return device_ ? device_->rank() : host_->rank(); }

  void ep_dispatch_async(const Tokens& tokens, const Ids& topk_ids, int lane = 0,
                         const max::TokenFormat& format = {});
  max::DispatchResult ep_dispatch_wait(int lane = 0);
  max::DispatchResult ep_fused_dispatch(const Tokens& tokens, const Ids& topk_ids, int lane = 0,
                                        const max::TokenFormat& format = {});
  void ep_combine_async(const max::CombineInput& input, const max::CombineOutput& output, int lane = 0);
  void ep_combine_wait(int lane = 0);
  void ep_fused_combine(const max::CombineInput& input, const max::CombineOutput& output, int lane = 0);

 private:
  // Memory of a device's call, kept until the call has ended.
  struct DeviceCall;

  Stream stream() const;
  DeviceCall& lane(int index) { return *calls_[static_cast<std::size_t>(index)]; }
  void upload_dispatch(const Tokens& tokens, const Ids& topk_ids, const max::TokenFormat& format,
                       DeviceCall& call) const;
  void upload_combine(const max::CombineInput& input, const max::CombineOutput& output,
                      DeviceCall& call) const;
  void download_results(int index);
  max::DispatchResult download(const max::DeviceDispatchResult& received, int index);

  std::unique_ptr<max::Exchange> host_;
  std::unique_ptr<max::DeviceExchange> device_;
  std::vector<std::unique_ptr<DeviceCall>> calls_;
};

}  // namespace ferry::contract
