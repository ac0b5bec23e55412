// One layer as a program, and its calls made by hand: the test that a run allocates nothing and
// bench/evaluator_time.cpp compare the two.
#pragma once

#include <cstdint>
#include <vector>

#include "ferry/evaluator.hpp"

namespace ferry::test {

inline constexpr const char* kLayer = R"(
  program moe
  input x: tokens
  input ids: ids
  rows = dispatch(x, ids)
  out: outputs = call experts(rows)
  y = combine(out, rows)
  output y
)";

inline Config layer_config(int hidden = 4, int lanes = 1) {
  return {.experts = 4,
          .top_k = 1,
          .hidden = hidden,
          .max_tokens = 4,
          .format = Format::fp32(),
          .combine_type = DType::fp32,
          .lanes = lanes};
}

// Experts that pass the received rows on.
inline void same_rows(ProgramInputs inputs, ProgramOutputs outputs) {
  outputs[0]->data = inputs[0]->received.data;
}

// The calls of the layer, or of overlap() of it, for the same experts.
struct LayerByHand {
  Exchange& exchange;
  const std::vector<float>& x;
  const std::vector<std::int32_t>& ids;
  int batches = 1;
  std::vector<float> y = std::vector<float>(x.size());

  void run() {
    if (batches == 1) {
      const DispatchResult rows = exchange.dispatch(tokens(0), ids.data());
      exchange.combine({rows.data, DType::fp32}, rows.plan, {y.data(), DType::fp32});
      return;
    }
    for (int lane = 0; lane < batches; ++lane)
      exchange.dispatch_send(tokens(lane), ids.data() + first(lane), nullptr, {.call = {.lane = lane}});
    for (int lane = 0; lane < batches; ++lane) {
      const DispatchResult rows = exchange.dispatch_receive({.lane = lane});
      exchange.combine_send({rows.data, DType::fp32}, rows.plan,
                            {y.data() + first(lane) * exchange.config().hidden, DType::fp32},
                            {.call = {.lane = lane}});
    }
    for (int lane = 0; lane < batches; ++lane) exchange.combine_receive({.lane = lane});
  }

  std::int64_t first(int batch) const { return batch * static_cast<std::int64_t>(ids.size()) / batches; }
  Tokens tokens(int batch) const {
    return Tokens::rows(x.data() + first(batch) * exchange.config().hidden, first(batch + 1) - first(batch),
                        DType::fp32);
  }
};

}  // namespace ferry::test
