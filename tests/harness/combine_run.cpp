#include "harness/combine_run.hpp"

#include <algorithm>
#include <cstring>

#include "harness/check.hpp"
#include "oracle/combine.hpp"

namespace ferry::contract {
CombineRun::CombineRun(Exchange& exchange, const Case& c, const Step& step, const oracle::Outcome& outcome,
                       const Plan& plan, const float* row_weights)
    : exchange_(exchange),
      case_(c),
      step_(step),
      outcome_(outcome),
      rank_(exchange.rank().index()),
      plan_(plan) {
  const std::int64_t hidden = c.config.hidden, tokens = step.positions.tokens(rank_);
  const auto total = static_cast<std::int64_t>(step.positions.ranks[rank_].rows.size());
  const std::int64_t output_row = hidden * bytes_of(outcome.outputs),
                     result_row = hidden * bytes_of(outcome.result);
  outputs_.type = outcome.outputs;
  outputs_.stride = c.output_gap > 0 ? output_row + c.output_gap : 0;
  // One row more than there are: what lies past the total is NaN and must not matter.
  rows_ = Buffer((total + 1) * (output_row + c.output_gap), kNan);
  lay_rows(outcome.ranks[rank_].rows, output_row, outputs_.stride, rows_.data());
  outputs_.data = rows_.data();

  const bool unreduced = outcome.reduction == Reduction::unreduced;
  result_.type = outcome.result;
  result_.stride = c.result_gap > 0 ? result_row + c.result_gap : 0;
  result_memory_ = Buffer(tokens * (unreduced ? c.config.top_k : 1) * (result_row + c.result_gap));
  result_.data = result_memory_.data();

  options_.reduction = outcome.reduction;
  options_.lane = c.lane;
  options_.sm_limit = c.sm_limit;
  if (outcome.weighted) {
    weights_ = Buffer(total * 4);
    if (row_weights != nullptr)
      std::memcpy(weights_.data(), row_weights, static_cast<std::size_t>(total) * 4);
    options_.row_weights = weights_.as<float>();
  }
  topk_weights_ = Buffer::of(outcome.ranks[rank_].topk_weights);
  if (outcome.topk_weighted) options_.topk_weights = topk_weights_.as<float>();
  row_values_ = Buffer::of(outcome.ranks[rank_].row_values);
  route_values_ = Buffer(tokens * c.config.top_k * 4);
  if (!c.values) return;
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
  if (case_.split) {
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
}

void CombineRun::compare() const {
  const std::int64_t row = case_.config.hidden * bytes_of(outcome_.result);
  if (result_.data != nullptr) {
    std::vector<std::byte> image(result_memory_.bytes(), kPoison);
    lay_rows(oracle::combined(case_.config, step_.positions, outcome_, rank_), row, result_.stride,
             image.data());
    result_memory_.require_image(image, static_cast<std::size_t>(bytes_of(outcome_.result)), "result");
  }
  rows_.require_guards("outputs");
  if (options_.route_values == nullptr) return;
  const std::vector<float> values = oracle::values_home(step_.positions, outcome_, rank_);
  route_values_.require_image(bytes_of_values(values), sizeof(float), "route_values");
}

}  // namespace ferry::contract
