#include <algorithm>

#include "tools/ferry/common/config.hpp"
#include "tools/ferry/run/device_context.hpp"
#include "tools/ferry/run/host_experts.hpp"

namespace ferry::app {

CombineOptions DeviceContext::combine_options(const DispatchResult& received) const {
  CombineOptions options;
  if (combine_applies_weights(spec_.config.layout, spec_.config.reduction))
    options.row_weights = received.weight;
  return options;
}

namespace {

class HostContext final : public DeviceContext {
 public:
  HostContext(const Rank& rank, const RunSpec& spec)
      : DeviceContext(rank, spec),
        experts_(spec, rank.index(), received_row_capacity(exchange_)),
        global_scale_(spec.global_scale()),
        result_(static_cast<std::size_t>(spec.result_bytes())) {}

  void set_inputs(const ContextInputs& inputs) override {
    inputs_ = &inputs;
    std::fill(result_.begin(), result_.end(), std::byte{0xFF});
  }
  void dispatch() override {
    received_ = exchange_.dispatch(Tokens::rows(inputs_->tokens.data(), spec_.tokens(), spec_.type),
                                   inputs_->routes.ids.data(), inputs_->routes.weights.data(),
                                   {.global_scale = spec_.options.global_scale ? &global_scale_ : nullptr});
  }
  void run_scaling_experts() override { experts_.scale(received_); }
  void run_swiglu_experts() override { experts_.swiglu(received_); }
  void combine() override {
    exchange_.combine(experts_.outputs(), received_.plan, {.data = result_.data(), .type = spec_.type},
                      combine_options(received_));
  }
  const DispatchResult& received() override { return received_; }
  std::span<const std::byte> result() override { return result_; }

 private:
  HostExperts experts_;
  const ContextInputs* inputs_ = nullptr;
  DispatchResult received_;
  float global_scale_;
  std::vector<std::byte> result_;
};

}  // namespace

std::unique_ptr<DeviceContext> make_host_context(const Rank& rank, const RunSpec& spec) {
  return std::make_unique<HostContext>(rank, spec);
}

}  // namespace ferry::app
