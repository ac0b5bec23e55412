#include "collective/two_hop_steps.hpp"

#include <gtest/gtest.h>

#include "collective/engine_ranks.hpp"
#include "harness/thread_engine.hpp"

namespace ferry::test {

std::vector<std::string> run_hosts_with_engine(const std::vector<int>& labels,
                                               const std::function<EngineFunctions(int)>& functions,
                                               const std::function<void(Rank)>& body) {
  return run_ranks(static_cast<int>(labels.size()), functions, body, labels);
}

void run_nodes(BackendKind backend, const std::vector<int>& labels, const std::function<void(Rank)>& body) {
  if (backend == BackendKind::cpu) {
    EXPECT_NO_THROW(Group::threads(Topology(labels)).run(body));
    return;
  }
  const ThreadEngine engine(static_cast<int>(labels.size()));
  const auto functions = [&](int rank) { return engine.functions(rank); };
  for (const std::string& error : run_hosts_with_engine(labels, functions, body)) EXPECT_EQ(error, "");
}

Config two_hop_config(BackendKind backend, int ranks, Hops hops, int window, ReductionLevel level) {
  return {.experts = 2 * ranks,
          .top_k = 3,
          .hidden = kHidden,
          .max_tokens = 40,
          .backend = backend,
          .hops = hops,
          .window = window,
          .format = Format::fp32(),
          .combine_type = DType::fp32,
          .reduction = Reduction::exact,
          .reduction_level = level};
}

Inputs::Inputs(const Config& config, int rank, std::int64_t tokens_of_rank)
    : count(tokens_of_rank), tokens(count * kHidden), weights(count * config.top_k) {
  std::uint32_t state = 2654435761u * static_cast<std::uint32_t>(rank + 1);
  weights.reserve(1);  // not null without tokens: the call has weights
  auto next = [&] { return (state = state * 1664525u + 1013904223u) >> 8; };
  for (float& value : tokens) value = static_cast<float>(next() % 1000) / 7 - 70;
  for (float& value : weights) value = static_cast<float>(next() % 64) / 16 - 2;
  for (std::int64_t i = 0; i < count * config.top_k; ++i)
    ids.push_back(static_cast<std::int32_t>(next() % static_cast<std::uint32_t>(config.experts + 1)) - 1);
}

Inputs inputs_of(const Config& config, int rank) {
  return {config, rank, rank == 1 ? 0 : config.max_tokens - rank};
}

void combine(Exchange& exchange, const DispatchResult& received, const Outputs& outputs, const Inputs& inputs,
             Reduction reduction, Form form, std::vector<float>& result) {
  result.assign(inputs.tokens.size(), -1);
  const CombineOptions options{.row_weights = received.weight, .reduction = reduction};
  const Result out{.data = result.data(), .type = DType::fp32};
  if (form == Form::fused) return exchange.combine(outputs, received.plan, out, options);
  exchange.combine_send(outputs, received.plan, out, options);
  if (form == Form::together) exchange.rank().barrier();
  exchange.combine_receive();
}

DispatchResult dispatch(Exchange& exchange, const Inputs& inputs, Form form) {
  const std::int32_t* ids = inputs.ids.data();
  if (form == Form::fused) return exchange.dispatch(inputs.given(), ids, inputs.weights.data());
  exchange.dispatch_send(inputs.given(), ids, inputs.weights.data());
  if (form == Form::together) exchange.rank().barrier();
  return exchange.dispatch_receive();
}

Outcome step(Exchange& exchange, const Inputs& inputs, Form form) {
  const DispatchResult received = dispatch(exchange, inputs, form);
  const auto total = static_cast<std::size_t>(*received.total);
  const auto* rows = static_cast<const float*>(received.data);
  Outcome outcome;
  outcome.rows.assign(rows, rows + total * kHidden);
  outcome.weights.assign(received.weight, received.weight + total);
  outcome.counts.assign(received.counts, received.counts + received.groups);
  outcome.sources.assign(received.source, received.source + total);
  const Outputs outputs{.data = outcome.rows.data(), .type = DType::fp32};
  combine(exchange, received, outputs, inputs, Reduction::partial, form, outcome.partial);
  combine(exchange, received, outputs, inputs, Reduction::exact, form, outcome.exact);
  return outcome;
}

}  // namespace ferry::test
