// An exchange as the tests of the contract call it, on any backend: operations return when they have ended
// and throw what ended them, and what they return lies in host memory.
#pragma once

#include <map>
#include <vector>

#include "ferry/exchange.hpp"
#include "harness/device_mirror.hpp"

namespace ferry::contract {

// Hides the operations of ferry::Exchange. On a device backend each is put on a stream of the calling thread
// and waited for.
class Exchange : public ferry::Exchange {
 public:
  Exchange(Rank rank, const Config& config);

  DispatchResult dispatch(const Tokens& tokens, const Ids& ids, const float* weights = nullptr,
                          const DispatchOptions& options = {});
  DispatchResult dispatch(const Tokens& tokens, const Plan& plan, const float* weights = nullptr,
                          const DispatchOptions& options = {});
  void dispatch_send(const Tokens& tokens, const Ids& ids, const float* weights = nullptr,
                     const DispatchOptions& options = {});
  void dispatch_send(const Tokens& tokens, const Plan& plan, const float* weights = nullptr,
                     const DispatchOptions& options = {});
  DispatchResult dispatch_receive(int lane = 0);

  void combine(const Outputs& outputs, const Plan& plan, const Result& result,
               const CombineOptions& options = {});
  void combine_send(const Outputs& outputs, const Plan& plan, const Result& result,
                    const CombineOptions& options = {});
  void combine_receive(int lane = 0);

  void route_values(const float* values, const Plan& plan, float* row_values, int lane = 0);
  DispatchResult combine_backward(const Tokens& d_result, const Plan& plan, const float* topk_weights,
                                  const Outputs& outputs, float* d_weights,
                                  const DispatchOptions& options = {});

  // One address for each that the backend returns.
  const StepMetadata* metadata(std::int32_t count, int lane = 0);

  const DispatchResult& last_dispatch_result(int lane = 0) const;

 private:
  struct Lane {
    CallMemory memory;
    bool sent = false;  // a send half whose receive half has not been called
    Format format{};    // of the last dispatch
    DispatchResult received;
    std::map<const StepMetadata*, StepMetadata> metadata;
  };

  bool on_device() const { return config().backend == BackendKind::cuda; }
  Stream stream() const;
  Lane& lane(int index);
  CallMemory& begin(int index);
  CallMemory& begin(const DispatchOptions& options);
  void sent(int index);
  void receive(int index);
  void wait(int index);
  void finish(int index);
  DispatchResult finish(int index, const DispatchResult& received);

  std::vector<Lane> lanes_;
};

}  // namespace ferry::contract
