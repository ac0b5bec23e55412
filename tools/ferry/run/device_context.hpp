// The device context of a rank: its exchange, its inputs and results, and its experts, either in host memory
// on the CPU or in device memory on a GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "ferry/exchange.hpp"
#include "ferry/group.hpp"
#include "tools/ferry/run/run_spec.hpp"

namespace ferry::app {

// A rank's inputs of one step.
struct ContextInputs {
  std::vector<std::byte> tokens;  // [N, hidden] of RunSpec::type
  Routes routes;
};

// Every method returns when its work is done, on a GPU too.
class DeviceContext {
 public:
  virtual ~DeviceContext() = default;
  DeviceContext(const DeviceContext&) = delete;
  DeviceContext& operator=(const DeviceContext&) = delete;

  // Sets the inputs of the next dispatches; the caller keeps them until the next call. Also overwrites the
  // last result with 0xFF bytes, so that a value that combine does not write cannot pass a check.
  virtual void set_inputs(const ContextInputs& inputs) = 0;

  // Collective.
  virtual void dispatch() = 0;
  virtual void combine() = 0;

  // Each writes one output row of RunSpec::type for every received row. In rank_major an output row is the
  // sum over the token's experts on this rank: slots ascending, sum = fma(weight, v, sum), with each v
  // rounded to RunSpec::type first, as Reduction::partial does.
  virtual void run_scaling_experts() = 0;  // expert e multiplies by factor_of(e)
  virtual void run_swiglu_experts() = 0;   // down(silu(x gate) * (x up))

  // Results of the last dispatch and combine in host memory, the plan included. Valid until the next
  // dispatch.
  virtual const DispatchResult& received() = 0;
  virtual std::span<const std::byte> result() = 0;

  const Exchange& exchange() const { return exchange_; }

 protected:
  DeviceContext(const Rank& rank, const RunSpec& spec) : spec_(spec), exchange_(rank, spec.config) {}

  CombineOptions combine_options(const DispatchResult& received) const;

  const RunSpec& spec_;
  Exchange exchange_;
};

// The factor of scaling expert e: a signed power of two. Products with a token's values are therefore exact,
// and ten neighbouring experts have different factors.
constexpr float factor_of(int expert) {
  constexpr float kPowers[] = {0.25F, 0.5F, 1.0F, 2.0F, 4.0F};
  return expert / 5 % 2 == 0 ? kPowers[expert % 5] : -kPowers[expert % 5];
}

// Collective. The GPU context uses the GPU of the rank's number on its host, modulo the number of GPUs, and
// makes it current in the calling thread.
// @throws UnsupportedError  make_gpu_context: the build, the driver, a GPU or cuBLAS is missing
std::unique_ptr<DeviceContext> make_host_context(const Rank& rank, const RunSpec& spec);
std::unique_ptr<DeviceContext> make_gpu_context(const Rank& rank, const RunSpec& spec);

}  // namespace ferry::app
