// Common base of the backends of experts in slices, on host and on device memory: holds the backend inside,
// which routes a slice of the tokens, and refuses what slices do not support.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "base/text.hpp"
#include "exchange/backend.hpp"
#include "exchange/sliced.hpp"
#include "ferry/error.hpp"

namespace ferry {

class SlicedBackendBase : public Backend, private GatherOperations {
 public:
  // Split calls are refused: slices gather from each other, so even a send phase would wait for peers.
  void dispatch_send(const DispatchCall& call, Stream stream) override {
    refuse_unsupported(Operation::dispatch, call.lane, stream, "phases: call dispatch()");
  }
  DispatchResult dispatch_receive(int, Stream) override { return {}; }  // no send phase was accepted
  void combine_send(const CombineCall& call, Stream stream) override {
    refuse_unsupported(Operation::combine, call.lane, stream, "phases: call combine()");
  }
  void combine_receive(int, Stream) override {}
  void route_values(const float*, const Plan&, float*, int lane, Stream stream) override {
    refuse_unsupported(Operation::route_values, lane, stream, "route_values");
  }
  DispatchCounts dispatch_counts(const Ids&, std::int32_t, int lane, Stream stream) override {
    refuse_unsupported(Operation::dispatch_counts, lane, stream,
                       "dispatch_counts: they have room for any routing");
  }

  const StepMetadata* metadata(const MetadataCall& call, Stream stream) override {
    return inner_->metadata(call, stream);
  }
  GatherOperations& gather_operations() override { return *this; }

 protected:
  explicit SlicedBackendBase(std::unique_ptr<Backend> inner) : inner_(std::move(inner)) {}

  Backend& inner() const { return *inner_; }

 private:
  [[noreturn]] void refuse_unsupported(Operation operation, int lane, Stream stream, const char* what) {
    const UnsupportedError error(str("experts in slices (Placement::ep_tp) do not have ", what));
    refuse(operation, lane, error, stream);
    throw error;
  }

  std::int64_t all_gather_v(const AllGatherCall& call, Stream stream) override {
    return inner_->gather_operations().all_gather_v(call, stream);
  }
  void reduce_scatter_v(const ReduceScatterCall& call, Stream stream) override {
    inner_->gather_operations().reduce_scatter_v(call, stream);
  }

  const std::unique_ptr<Backend> inner_;
};

}  // namespace ferry
