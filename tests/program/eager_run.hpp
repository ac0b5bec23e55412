// The calls of a program made one by one, for comparison with its evaluator; the functions of the tests'
// programs, and inputs for them.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "ferry/evaluator.hpp"
#include "harness/random.hpp"

namespace ferry::contract {

using Inputs = std::span<const ProgramValue* const>;
using Made = std::span<ProgramValue* const>;
using Floats = std::vector<float>;

inline constexpr int kHidden = 16;

// Row by row: a factor of the row's expert.
inline void experts(Inputs inputs, Made outputs) {
  const DispatchResult& rows = inputs[0]->received;
  const auto* const x = static_cast<const float*>(rows.data);
  auto* const y = static_cast<float*>(outputs[0]->data);
  for (int group = 0; group < rows.groups; ++group) {
    const std::int64_t first = std::int64_t{rows.row_offsets[group]} * kHidden;
    for (std::int64_t i = first; i < first + std::int64_t{rows.counts[group]} * kHidden; ++i)
      y[i] = x[i] * (1.0f + 0.25f * static_cast<float>(rows.group_expert[group]));
  }
}

// a + b / 2 of two tokens values.
inline void mix(Inputs inputs, Made outputs) {
  const auto *const a = static_cast<const float*>(inputs[0]->data), *const b = static_cast<const float*>(
                                                                        inputs[1]->data);
  auto* const y = static_cast<float*>(outputs[0]->data);
  for (std::int64_t i = 0; i < outputs[0]->rows * kHidden; ++i) y[i] = a[i] + b[i] / 2;
}

// Weights of another kind, and N.
inline void regate(Inputs inputs, Made outputs) {
  const auto* const weights = static_cast<const float*>(inputs[0]->data);
  auto* const made = static_cast<float*>(outputs[0]->data);
  const std::int64_t top_k = inputs[1]->count;
  for (std::int64_t i = 0; i < inputs[0]->rows * top_k; ++i) made[i] = weights[i] * weights[i];
  outputs[1]->count = static_cast<std::int32_t>(inputs[0]->rows);
}

inline const ProgramFunctions kFunctions = {{"experts", experts}, {"mix", mix}, {"regate", regate}};

struct RankInputs {
  Floats x, weights;
  std::vector<std::int32_t> ids;
  std::int64_t tokens;
  std::int32_t top_k;

  RankInputs(const Config& config, std::uint64_t seed, int rank, std::int64_t most)
      : tokens(0), top_k(config.top_k) {
    Random random = Random::of({seed, static_cast<std::uint64_t>(rank)});
    tokens = random.below(most + 1);
    for (std::int64_t i = 0; i < tokens * kHidden; ++i)
      x.push_back(static_cast<float>(random.between(-999, 999)) / 7);
    for (std::int64_t i = 0; i < tokens * config.top_k; ++i) {
      ids.push_back(random.between(-1, config.experts - 1));
      weights.push_back(static_cast<float>(random.uniform()));
    }
  }

  std::vector<ProgramValue> values() const {
    return {ProgramValue::tokens(x.data(), tokens, DType::fp32), ProgramValue::ids(ids.data(), tokens),
            ProgramValue::weights(weights.data(), tokens), ProgramValue::number(top_k)};
  }
};

// The calls of a program one by one. Every value is copied out of the lanes when it is made.
class EagerRun {
 public:
  EagerRun(Exchange& exchange, const RankInputs& inputs) : exchange_(exchange), inputs_(inputs) {
    tokens_["x"] = inputs.x;
    weights_["weights"] = inputs.weights;
    counts_["k"] = inputs.top_k;
  }

  void run(const ProgramStep& step) {
    const std::string& name = step.outputs[0].name;
    switch (step.kind) {
      case StepKind::dispatch:
      case StepKind::dispatch_send:
        return dispatch(step, name);
      case StepKind::dispatch_receive:
        return keep(name, exchange_.dispatch_receive({.lane = lane_of_.at(step.inputs[0])}));
      case StepKind::combine:
      case StepKind::combine_send:
        return combine(step, name);
      case StepKind::combine_receive:
        exchange_.combine_receive({.lane = lane_of_.at(step.inputs[0])});
        tokens_[name] = results_.at(step.inputs[0]);
        return;
      case StepKind::metadata:
        metadata_[name] = *exchange_.metadata(counts_.at(step.inputs[0]), {.lane = step.lane});
        return;
      case StepKind::all_gather_v:
        return gather(step, name);
      case StepKind::reduce_scatter_v: {
        const Floats& rows = tokens_.at(step.inputs[0]);
        Floats& sums = tokens_[name];
        sums.resize(static_cast<std::size_t>(inputs_.tokens * kHidden));
        exchange_.reduce_scatter_v({.rows = address(rows),
                                    .total = rows_of(rows, kHidden),
                                    .type = DType::fp32,
                                    .sums = sums.data(),
                                    .count = inputs_.tokens},
                                   {.lane = step.lane});
        return;
      }
      case StepKind::wait:
        rows_[name] = rows_.at(step.inputs[0]);
        return;
      default:
        return call(step, name);
    }
  }

  const Floats& tokens(const std::string& name) const { return tokens_.at(name); }
  const Floats& weights(const std::string& name) const { return weights_.at(name); }
  const StepMetadata& metadata(const std::string& name) const { return metadata_.at(name); }

 private:
  struct Rows {
    DispatchResult received;
    Plan plan;
    Floats values, weight;
    std::vector<std::int32_t> counts, row_offsets, group_expert;
  };

  static const float* address(const Floats& values) {
    static const float none = 0;
    return values.empty() ? &none : values.data();
  }
  const float* weights_of(const std::string& name) const { return address(weights_.at(name)); }

  static std::int64_t rows_of(const Floats& values, std::int64_t columns) {
    return static_cast<std::int64_t>(values.size()) / columns;
  }

  void gather(const ProgramStep& step, const std::string& name) {
    const bool is_tokens = tokens_.contains(step.inputs[0]);
    const std::int64_t columns = is_tokens ? kHidden : inputs_.top_k;
    const Floats& mine = (is_tokens ? tokens_ : weights_).at(step.inputs[0]);
    Floats all(static_cast<std::size_t>(exchange_.config().max_tokens * exchange_.rank().size() * columns));
    const std::int64_t rows = exchange_.all_gather_v({.rows = address(mine),
                                                      .count = rows_of(mine, columns),
                                                      .row_bytes = columns * 4,
                                                      .gathered = all.data(),
                                                      .capacity = rows_of(all, columns)},
                                                     {.lane = step.lane});
    all.resize(static_cast<std::size_t>(rows * columns));
    (is_tokens ? tokens_ : weights_)[name] = all;
  }

  void dispatch(const ProgramStep& step, const std::string& name) {
    const Tokens tokens = Tokens::rows(tokens_.at(step.inputs[0]).data(), inputs_.tokens, DType::fp32);
    const float* const weights = step.inputs.size() > 2 ? weights_of(step.inputs[2]) : nullptr;
    const auto plan = rows_.find(step.inputs[1]);
    const DispatchOptions options{.call = {.lane = step.lane}};
    lane_of_[name] = step.lane;
    if (step.kind == StepKind::dispatch_send) {
      return plan == rows_.end() ? exchange_.dispatch_send(tokens, inputs_.ids.data(), weights, options)
                                 : exchange_.dispatch_send(tokens, plan->second.plan, weights, options);
    }
    keep(name, plan == rows_.end() ? exchange_.dispatch(tokens, inputs_.ids.data(), weights, options)
                                   : exchange_.dispatch(tokens, plan->second.plan, weights, options));
  }

  void keep(const std::string& name, const DispatchResult& received) {
    const auto* const values = static_cast<const float*>(received.data);
    const std::int64_t total = *received.total;
    Rows& rows = rows_[name];
    rows.received = received;
    rows.plan = received.plan.copy();
    rows.values.assign(values, values + total * kHidden);
    if (received.weight != nullptr) rows.weight.assign(received.weight, received.weight + total);
    rows.counts.assign(received.counts, received.counts + received.groups);
    rows.row_offsets.assign(received.row_offsets, received.row_offsets + received.groups + 1);
    rows.group_expert.assign(received.group_expert, received.group_expert + received.groups);
    rows.received.data = rows.values.data();
    if (received.weight != nullptr) rows.received.weight = rows.weight.data();
    rows.received.counts = rows.counts.data();
    rows.received.row_offsets = rows.row_offsets.data();
    rows.received.group_expert = rows.group_expert.data();
  }

  void combine(const ProgramStep& step, const std::string& name) {
    const Rows& rows = rows_.at(step.inputs[1]);
    CombineOptions options{.call = {.lane = step.lane}};
    if (step.inputs.size() > 2) {
      const auto by_row = rows_.find(step.inputs[2]);
      if (by_row != rows_.end())
        options.row_weights = by_row->second.received.weight;
      else
        options.topk_weights = weights_of(step.inputs[2]);
    }
    const Outputs outputs{outputs_.at(step.inputs[0]).data(), DType::fp32};
    Floats& result = step.kind == StepKind::combine ? tokens_[name] : results_[name];
    result.assign(static_cast<std::size_t>(inputs_.tokens * kHidden), -1.0f);
    lane_of_[name] = step.lane;
    if (step.kind == StepKind::combine)
      return exchange_.combine(outputs, rows.plan, {result.data(), DType::fp32}, options);
    exchange_.combine_send(outputs, rows.plan, {result.data(), DType::fp32}, options);
  }

  void call(const ProgramStep& step, const std::string& name) {
    ProgramValue first, second, made, number;
    const ProgramValue* const taken[] = {&first, &second};
    ProgramValue* const given[] = {&made, &number};
    if (step.function == "experts") {
      first.received = rows_.at(step.inputs[0]).received;
      Floats& outputs = outputs_[name];
      outputs.resize(rows_.at(step.inputs[0]).values.size());
      made.data = outputs.data();
      experts(taken, given);
    } else if (step.function == "mix") {
      const std::size_t values = tokens_.at(step.inputs[0]).size();
      made.rows = static_cast<std::int64_t>(values) / kHidden;
      first = ProgramValue::tokens(tokens_.at(step.inputs[0]).data(), made.rows, DType::fp32);
      second = ProgramValue::tokens(tokens_.at(step.inputs[1]).data(), made.rows, DType::fp32);
      Floats& tokens = tokens_[name];
      tokens.resize(values);
      made.data = tokens.data();
      mix(taken, given);
    } else {
      first = ProgramValue::weights(weights_.at(step.inputs[0]).data(), inputs_.tokens);
      second.count = inputs_.top_k;
      Floats& weights = weights_[name];
      weights.resize(inputs_.weights.size());
      made.data = weights.data();
      regate(taken, given);
      counts_[step.outputs[1].name] = number.count;
    }
  }

  Exchange& exchange_;
  const RankInputs& inputs_;
  std::map<std::string, Floats> tokens_, weights_, outputs_, results_;
  std::map<std::string, std::int32_t> counts_;
  std::map<std::string, Rows> rows_;
  std::map<std::string, StepMetadata> metadata_;
  std::map<std::string, int> lane_of_;
};

}  // namespace ferry::contract
