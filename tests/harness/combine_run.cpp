#include "harness/combine_run.hpp"

#include <algorithm>
#include <cstring>

#include "harness/check.hpp"
#include "oracle/combine.hpp"

namespace ferry::contract {

CombineRun::CombineRun(SyncExchange& exchange, const TestCase& c, const StepInputs& step,
                       const oracle::ExpertOutputs& expert_outputs, const Plan& plan,
                       const float* row_weights)
    : exchange_(exchange),
      case_(c),
      step_(step),
      expert_outputs_(expert_outputs),
      rank_(exchange.rank().index()),
      plan_(plan) {
  const std::int64_t hidden = c.config.hidden, tokens = step.positions.tokens(rank_);
  const auto total = static_cast<std::int64_t>(step.positions.ranks[rank_].rows.size());
  const std::int64_t output_row = hidden * bytes_of(expert_outputs.outputs),
                     result_row = hidden * bytes_of(expert_outputs.result);
  outputs_.type = expert_outputs.outputs;
  outputs_.stride = c.output_gap > 0 ? output_row + c.output_gap : 0;
  // One row of NaN past the total: it must not influence the result.
  rows_ = GuardedBuffer((total + 1) * (output_row + c.output_gap), kNan);
  copy_rows(expert_outputs.ranks[rank_].rows, output_row, outputs_.stride, rows_.data());
  outputs_.data = rows_.data();

  const bool unreduced = expert_outputs.reduction == Reduction::unreduced;
  result_.type = expert_outputs.result;
  result_.stride = c.result_gap > 0 ? result_row + c.result_gap : 0;
  result_memory_ = GuardedBuffer(tokens * (unreduced ? c.config.top_k : 1) * (result_row + c.result_gap));
  result_.data = result_memory_.data();

  options_.reduction = expert_outputs.reduction;
  options_.call = {.lane = c.lane, .sm_limit = c.sm_limit};
  if (expert_outputs.weighted) {
    weights_ = GuardedBuffer(total * 4);
    if (row_weights != nullptr)
      std::memcpy(weights_.data(), row_weights, static_cast<std::size_t>(total) * 4);
    options_.row_weights = weights_.as<float>();
  }
  topk_weights_ = GuardedBuffer::of(expert_outputs.ranks[rank_].topk_weights);
  // Ranks without tokens pass an address or, where their number is odd, null.
  options_.topk_weighted = expert_outputs.topk_weighted && tokens == 0 && rank_ % 2 == 1;
  if (expert_outputs.topk_weighted && !options_.topk_weighted)
    options_.topk_weights = topk_weights_.as<float>();
  row_values_ = GuardedBuffer::of(expert_outputs.ranks[rank_].row_values);
  route_values_ = GuardedBuffer(tokens * c.config.top_k * 4);
  shared_outputs_ = GuardedBuffer(c.config.shared_experts * tokens * result_row);
  if (expert_outputs.shared_outputs) options_.shared_outputs = shared_outputs_.data();
  if (!c.row_values) return;
  options_.row_values = row_values_.as<float>();
  options_.route_values = route_values_.as<float>();
}

void CombineRun::call() {
  exchange_.combine(outputs_, plan_, result_, options_);
}

void CombineRun::send() {
  exchange_.combine_send(outputs_, plan_, result_, options_);
  rows_.fill(kNan);
  weights_.fill(kNan);
  row_values_.fill(kNan);
}

void CombineRun::receive() {
  exchange_.combine_receive(case_.lane);
}

void CombineRun::run() {
  if (case_.split_phases) {
    send();
    receive();
  } else {
    call();
  }
  compare();
  exchange_.check(case_.lane);
}

void CombineRun::require_guards() const {
  rows_.require_guards("outputs");
  weights_.require_guards("weights");
  row_values_.require_guards("row_values");
  result_memory_.require_guards("result");
  route_values_.require_guards("route_values");
  shared_outputs_.require_guards("shared_outputs");
}

void CombineRun::compare() const {
  const std::int64_t row = case_.config.hidden * bytes_of(expert_outputs_.result);
  if (result_.data != nullptr) {
    std::vector<std::byte> image(result_memory_.bytes(), kPoison);
    copy_rows(
        oracle::combined(case_.config, step_.positions, expert_outputs_, exchange_.rank().topology(), rank_),
        row, result_.stride, image.data());
    result_memory_.require_contents(image, static_cast<std::size_t>(bytes_of(expert_outputs_.result)),
                                    "result");
  }
  if (options_.shared_outputs != nullptr) {
    shared_outputs_.require_contents(
        oracle::returned_shared_rows(case_.config, step_.positions, expert_outputs_, rank_),
        static_cast<std::size_t>(bytes_of(expert_outputs_.result)), "shared_outputs");
  }
  rows_.require_guards("outputs");
  if (options_.route_values == nullptr) return;
  const std::vector<float> values = oracle::returned_row_values(step_.positions, expert_outputs_, rank_);
  route_values_.require_contents(bytes_of_values(values), sizeof(float), "route_values");
}

}  // namespace ferry::contract
