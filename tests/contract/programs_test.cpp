// Programs against the same calls made one by one: random programs, micro-batches, functions that fail.
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "harness/harness.hpp"
#include "harness/random.hpp"
#include "oracle/numbers.hpp"

namespace ferry::contract {
namespace {

using Inputs = std::span<const ProgramValue* const>;
using Made = std::span<ProgramValue* const>;
using Floats = std::vector<float>;

constexpr int kHidden = 16;

Config program_config(Random& random, int ranks) {
  Config config{.experts = ranks * random.between(1, 3),
                .top_k = random.between(1, 3),
                .hidden = kHidden,
                .max_tokens = 9,
                .format = Format::fp32(),
                .combine_type = DType::fp32};
  config.layout = random.pick({Layout::expert_major, Layout::expert_major, Layout::expert_padded});
  config.reduction = random.pick({Reduction::partial, Reduction::exact});
  config.repeats = true;  // nothing is dropped
  config.alignment = random.pick({1, 4});
  return config;
}

// Row by row: a factor of the row's expert.
void experts(Inputs inputs, Made outputs) {
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
void mix(Inputs inputs, Made outputs) {
  const auto *const a = static_cast<const float*>(inputs[0]->data), *const b = static_cast<const float*>(
                                                                        inputs[1]->data);
  auto* const y = static_cast<float*>(outputs[0]->data);
  for (std::int64_t i = 0; i < outputs[0]->rows * kHidden; ++i) y[i] = a[i] + b[i] / 2;
}

// Weights of another kind, and N.
void regate(Inputs inputs, Made outputs) {
  const auto* const weights = static_cast<const float*>(inputs[0]->data);
  auto* const made = static_cast<float*>(outputs[0]->data);
  const std::int64_t top_k = inputs[1]->count;
  for (std::int64_t i = 0; i < inputs[0]->rows * top_k; ++i) made[i] = weights[i] * weights[i];
  outputs[1]->count = static_cast<std::int32_t>(inputs[0]->rows);
}

const ProgramFunctions kFunctions = {{"experts", experts}, {"mix", mix}, {"regate", regate}};

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

Program empty_program() {
  return {.name = "drawn",
          .inputs = {{"x", ValueKind::tokens},
                     {"ids", ValueKind::ids},
                     {"weights", ValueKind::weights},
                     {"k", ValueKind::count}},
          .steps = {},
          .outputs = {}};
}

// Draws programs: steps whose inputs are of the right kinds, of which those stay that check() accepts.
class ProgramMaker {
 public:
  ProgramMaker(Random& random, Reduction reduction) : random_(random), reduction_(reduction) {
    for (const ProgramName& input : program_.inputs) named_[input.kind].push_back(input.name);
  }

  Program draw(int steps) {
    while (static_cast<int>(program_.steps.size() + open_.size()) < steps) {
      if (!open_.empty() && random_.chance(0.3)) {
        receive(random_.below(static_cast<std::int64_t>(open_.size())));
      } else if (std::optional<ProgramStep> step = draw_step()) {
        add(*step);
      }
    }
    while (!open_.empty()) receive(0);
    for (const std::string& tokens : named_[ValueKind::tokens]) program_.outputs.push_back(tokens);
    for (const std::string& metadata : named_[ValueKind::metadata]) program_.outputs.push_back(metadata);
    return program_;
  }

 private:
  std::string one_of(ValueKind kind) {
    const auto& names = named_[kind];
    return names.empty()
               ? "missing"
               : names[static_cast<std::size_t>(random_.below(static_cast<std::int64_t>(names.size())))];
  }

  std::optional<ProgramStep> draw_step() {
    const StepKind kind = random_.pick({StepKind::dispatch, StepKind::dispatch_send, StepKind::combine,
                                        StepKind::combine, StepKind::combine_send, StepKind::metadata,
                                        StepKind::call, StepKind::call, StepKind::wait});
    ProgramStep step{.kind = kind, .outputs = {{"v" + std::to_string(program_.steps.size())}}, .lane = 0};
    const bool dispatch = kind == StepKind::dispatch || kind == StepKind::dispatch_send;
    if (dispatch) {
      step.inputs = {one_of(ValueKind::tokens),
                     one_of(random_.chance(0.25) ? ValueKind::received : ValueKind::ids)};
      if (random_.chance(0.6)) step.inputs.push_back(one_of(ValueKind::weights));
    } else if (kind == StepKind::combine || kind == StepKind::combine_send) {
      const std::string outputs = one_of(ValueKind::outputs), rows = rows_of_[outputs];
      step.inputs = {outputs, rows};
      const bool partial_send = kind == StepKind::combine_send && reduction_ == Reduction::partial;
      if (random_.chance(0.6))
        step.inputs.push_back(partial_send || random_.chance(0.5) ? rows : one_of(ValueKind::weights));
    } else if (kind == StepKind::metadata) {
      step.inputs = {one_of(ValueKind::count)};
    } else if (kind == StepKind::wait) {
      step.inputs = {one_of(ValueKind::received)};
    } else if (random_.chance(0.6)) {
      step.function = "experts";
      step.inputs = {one_of(ValueKind::received)};
      step.outputs[0].kind = ValueKind::outputs;
    } else if (random_.chance(0.5)) {
      step.function = "mix";
      step.inputs = {one_of(ValueKind::tokens), one_of(ValueKind::tokens)};
      step.outputs[0].kind = ValueKind::tokens;
    } else {
      step.function = "regate";
      step.inputs = {one_of(ValueKind::weights), "k"};
      step.outputs[0].kind = ValueKind::weights;
      step.outputs.push_back({step.outputs[0].name + ".n", ValueKind::count});
    }
    if (dispatch || kind == StepKind::combine || kind == StepKind::combine_send || kind == StepKind::metadata)
      step.lane = random_.below(3);
    return accepted(step) ? std::optional(step) : std::nullopt;
  }

  // Whether check() accepts the program with this step, all open calls received behind it.
  bool accepted(const ProgramStep& step) const {
    Program tried = program_;
    tried.steps.push_back(step);
    std::vector<ProgramStep> open = open_;
    if (step.kind == StepKind::dispatch_send || step.kind == StepKind::combine_send)
      open.push_back(receive_of(step));
    tried.steps.insert(tried.steps.end(), open.begin(), open.end());
    return usage_error([&] { check(tried); }).empty();
  }

  static ProgramStep receive_of(const ProgramStep& send) {
    const bool dispatch = send.kind == StepKind::dispatch_send;
    return {.kind = dispatch ? StepKind::dispatch_receive : StepKind::combine_receive,
            .inputs = {send.outputs[0].name},
            .outputs = {
                {send.outputs[0].name + ".received", dispatch ? ValueKind::received : ValueKind::tokens}}};
  }

  void receive(int index) {
    const ProgramStep step = open_[static_cast<std::size_t>(index)];
    open_.erase(open_.begin() + index);
    add(step);
  }

  void add(ProgramStep step) {
    const std::string name = step.outputs[0].name;
    switch (step.kind) {
      case StepKind::dispatch_send:
      case StepKind::combine_send:
        open_.push_back(receive_of(step));
        step.outputs[0].kind =
            step.kind == StepKind::dispatch_send ? ValueKind::sent_dispatch : ValueKind::sent_combine;
        break;
      case StepKind::dispatch:
      case StepKind::dispatch_receive:
      case StepKind::wait:
        step.outputs[0].kind = ValueKind::received;
        break;
      case StepKind::metadata:
        step.outputs[0].kind = ValueKind::metadata;
        break;
      default:
        break;
    }
    if (step.outputs[0].kind == ValueKind::outputs) rows_of_[name] = step.inputs[0];
    for (const ProgramName& made : step.outputs) named_[made.kind].push_back(made.name);
    program_.steps.push_back(std::move(step));
  }

  Random& random_;
  Reduction reduction_;
  Program program_ = empty_program();
  std::map<ValueKind, std::vector<std::string>> named_;
  std::map<std::string, std::string> rows_of_;  // outputs -> the received rows that they answer
  std::vector<ProgramStep> open_;               // receive phases that are missing yet
};

// The calls of a program one by one. Every value is copied out of the lanes when it is made.
class EagerRun {
 public:
  EagerRun(Exchange& exchange, const RankInputs& inputs)
      : exchange_(exchange), config_(exchange.config()), inputs_(inputs) {
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
        return keep(name, exchange_.dispatch_receive(lane_of_.at(step.inputs[0])));
      case StepKind::combine:
      case StepKind::combine_send:
        return combine(step, name);
      case StepKind::combine_receive:
        exchange_.combine_receive(lane_of_.at(step.inputs[0]));
        tokens_[name] = results_.at(step.inputs[0]);
        return;
      case StepKind::metadata:
        metadata_[name] = *exchange_.metadata(counts_.at(step.inputs[0]), step.lane);
        return;
      case StepKind::wait:
        rows_[name] = rows_.at(step.inputs[0]);
        return;
      default:
        return call(step, name);
    }
  }

  const Floats& tokens(const std::string& name) const { return tokens_.at(name); }
  const StepMetadata& metadata(const std::string& name) const { return metadata_.at(name); }

 private:
  struct Rows {
    DispatchResult received;
    Plan plan;
    Floats values, weight;
    std::vector<std::int32_t> counts, row_offsets, group_expert;
  };

  const float* weights_of(const std::string& name) const {
    static const float none = 0;
    const Floats& weights = weights_.at(name);
    return weights.empty() ? &none : weights.data();
  }

  void dispatch(const ProgramStep& step, const std::string& name) {
    const Tokens tokens = Tokens::rows(tokens_.at(step.inputs[0]).data(), inputs_.tokens, DType::fp32);
    const float* const weights = step.inputs.size() > 2 ? weights_of(step.inputs[2]) : nullptr;
    const auto plan = rows_.find(step.inputs[1]);
    lane_of_[name] = step.lane;
    if (step.kind == StepKind::dispatch_send) {
      return plan == rows_.end()
                 ? exchange_.dispatch_send(tokens, inputs_.ids.data(), weights, {.lane = step.lane})
                 : exchange_.dispatch_send(tokens, plan->second.plan, weights, {.lane = step.lane});
    }
    keep(name, plan == rows_.end()
                   ? exchange_.dispatch(tokens, inputs_.ids.data(), weights, {.lane = step.lane})
                   : exchange_.dispatch(tokens, plan->second.plan, weights, {.lane = step.lane}));
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
    CombineOptions options{.lane = step.lane};
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
      first = ProgramValue::tokens(tokens_.at(step.inputs[0]).data(), inputs_.tokens, DType::fp32);
      second = ProgramValue::tokens(tokens_.at(step.inputs[1]).data(), inputs_.tokens, DType::fp32);
      made.rows = inputs_.tokens;
      Floats& tokens = tokens_[name];
      tokens.resize(static_cast<std::size_t>(inputs_.tokens * kHidden));
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
  const Config& config_;
  const RankInputs& inputs_;
  std::map<std::string, Floats> tokens_, weights_, outputs_, results_;
  std::map<std::string, std::int32_t> counts_;
  std::map<std::string, Rows> rows_;
  std::map<std::string, StepMetadata> metadata_;
  std::map<std::string, int> lane_of_;
};

void require_tokens(const ProgramValue& value, const Floats& expected, const std::string& what) {
  require_equal(value.rows * kHidden, static_cast<std::int64_t>(expected.size()), what, ": values");
  require_equal_bytes({static_cast<const std::byte*>(value.data), expected.size() * 4},
                      std::as_bytes(std::span(expected)), 4, what);
}

TEST_P(Contract, RandomProgramsMakeTheBitsOfEagerCalls) {
  if (GetParam().on_device()) GTEST_SKIP() << "the C++ evaluator runs on host memory";
  for (const int ranks : {1, 2, 3, 4}) {
    for (std::uint64_t number = 0; number < 5; ++number) {
      const std::uint64_t seed = seed_of(100 * static_cast<std::uint64_t>(ranks) + number);
      Random random(seed);
      Config config = on_backend(program_config(random, ranks));
      config.lanes = 3;
      const Program program = ProgramMaker(random, config.reduction).draw(random.between(6, 12));
      ASSERT_EQ(to_string(parse_program(to_string(program))), to_string(program));
      run(ranks, to_string(program), [&](const Rank& rank) {
        Exchange eager_exchange(rank, config), exchange(rank, config);
        Evaluator evaluator(parse_program(to_string(program)), exchange, kFunctions);
        for (std::uint64_t again = 0; again < 2; ++again) {  // with other tokens
          const RankInputs inputs(config, seed + again, rank.index(), config.max_tokens);
          EagerRun eager(eager_exchange, inputs);
          for (const ProgramStep& step : program.steps) eager.run(step);
          const auto outputs = evaluator.run(inputs.values());
          for (std::size_t i = 0; i < outputs.size(); ++i) {
            const std::string& name = program.outputs[i];
            if (outputs[i]->kind == ValueKind::tokens) {
              require_tokens(*outputs[i], eager.tokens(name), name);
            } else {
              require(std::memcmp(&outputs[i]->metadata, &eager.metadata(name), sizeof(StepMetadata)) == 0,
                      name, " differs");
            }
          }
        }
      });
    }
  }
}

// Two layers; the second takes the mix of the first's result and its input.
Program layers(bool row_weights) {
  return parse_program(std::string(R"(
    program layers
    input x: tokens
    input ids: ids
    input weights: weights
    rows = dispatch(x, ids, weights)
    outputs: outputs = call experts(rows)
    y = combine(outputs, rows, )") +
                       (row_weights ? "rows" : "weights") + R"()
    h: tokens = call mix(y, x)
    sent = dispatch_send(h, rows, weights) lane=1
    again = dispatch_receive(sent)
    outputs2: outputs = call experts(again)
    z = combine(outputs2, again)
    output z
    output y
  )");
}

TEST_P(Contract, MicroBatchesMakeTheBytesOfThePlainProgram) {
  if (GetParam().on_device()) GTEST_SKIP() << "the C++ evaluator runs on host memory";
  for (const int ranks : {1, 2, 4}) {
    for (const int batches : {1, 2, 3, 5}) {
      const std::uint64_t seed = seed_of(static_cast<std::uint64_t>(10 * ranks + batches));
      Random random(seed);
      Config config = on_backend(program_config(random, ranks));
      config.lanes = 2 * batches;
      const Program plain = layers(random.chance(0.5)), batched = overlap(plain, batches);
      ASSERT_EQ(parse_program(to_string(batched)), batched);
      run(ranks, to_string(batched), [&](const Rank& rank) {
        const RankInputs inputs(config, seed, rank.index(), config.max_tokens);
        Exchange plain_exchange(rank, config), exchange(rank, config);
        Evaluator whole(plain, plain_exchange, kFunctions), split(batched, exchange, kFunctions);
        const std::vector<ProgramValue> given = {inputs.values()[0], inputs.values()[1], inputs.values()[2]};
        for (int again = 0; again < 2; ++again) {
          const auto expected = whole.run(given);
          const auto found = split.run(given);
          for (std::size_t i = 0; i < 2; ++i) {
            const auto* const values = static_cast<const float*>(expected[i]->data);
            require_tokens(*found[i], Floats(values, values + expected[i]->rows * kHidden),
                           batched.outputs[i]);
          }
        }
      });
    }
  }
}

// The function fails on one rank, or on all; the other ranks get its text, and the next run is as if nothing
// had happened.
TEST_P(Contract, AFunctionThatFailsEndsTheRunOnAllRanks) {
  if (GetParam().on_device()) GTEST_SKIP() << "the C++ evaluator runs on host memory";
  constexpr int kAll = 3;
  const Program batched = overlap(layers(true), 2);
  Random random(seed_of(3));
  Config config = on_backend(program_config(random, 3));
  config.lanes = 4;
  run(3, "a failing function", [&](const Rank& rank) {
    Exchange exchange(rank, config), plain_exchange(rank, config);
    const RankInputs inputs(config, seed_of(4), rank.index(), config.max_tokens);
    const std::vector<ProgramValue> given = {inputs.values()[0], inputs.values()[1], inputs.values()[2]};
    int calls_left = -1;  // before the function fails; -1: it does not
    ProgramFunctions functions = kFunctions;
    functions["experts"] = [&](Inputs taken, Made made) {
      if (calls_left-- == 0) throw std::out_of_range("no such expert");
      experts(taken, made);
    };
    Evaluator evaluator(batched, exchange, functions), plain(layers(true), plain_exchange, kFunctions);
    const auto expected = plain.run(given)[0];
    const auto* const values = static_cast<const float*>(expected->data);
    for (int call = 0; call < 4; ++call) {
      for (const int failing : {1, 2, kAll}) {
        const bool fails = failing == kAll || rank.index() == failing;
        calls_left = fails ? call : -1;
        std::string found;
        try {
          evaluator.run(given);
        } catch (const std::out_of_range& error) {
          found = error.what();
        } catch (const UsageError& error) {
          found = error.what();
        }
        if (fails) {
          require_equal(found, "no such expert", "rank ", rank.index(), ", call ", call);
        } else {
          require(found.find(str("failed on rank ", failing, ": no such expert")) != std::string::npos &&
                      found.starts_with("program layers, step "),
                  "rank ", rank.index(), ", call ", call, ": '", found, "'");
        }
        calls_left = -1;
        require_tokens(*evaluator.run(given)[0], Floats(values, values + expected->rows * kHidden),
                       "after the failure");
      }
    }
  });
}

}  // namespace
}  // namespace ferry::contract
