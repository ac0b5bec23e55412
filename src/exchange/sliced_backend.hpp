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

class SlicedBackendBase : public Backend {
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
  SmallResult run(const SmallCall& call, Stream stream) override {
    const Operation operation = operation_of(call);
    if (operation == Operation::route_values)
      refuse_unsupported(operation, lane_of(call), stream, "route_values");
    if (operation == Operation::dispatch_counts) {
      refuse_unsupported(operation, lane_of(call), stream, "dispatch_counts: they have room for any routing");
    }
    return inner_->run(call, stream);
  }

 protected:
  explicit SlicedBackendBase(std::unique_ptr<Backend> inner) : inner_(std::move(inner)) {}

  Backend& inner() const { return *inner_; }

 private:
  [[noreturn]] void refuse_unsupported(Operation operation, int lane, Stream stream, const char* what) {
    const UnsupportedError error(str("experts in slices (Placement::ep_tp) do not have ", what));
    refuse(operation, lane, error, stream);
    throw error;
  }

  const std::unique_ptr<Backend> inner_;
};

}  // namespace ferry
