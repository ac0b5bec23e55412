// The MoE block of a transformer layer as a program: norm, router, routed and shared experts, residual.
//
// The shared experts run between dispatch's phases, while routed tokens are on their way. The block runs as
// one batch and as two micro-batches, of which one's messages travel while the other's experts run. Both make
// the same bytes.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <ferry/ferry.hpp>
#include <string>
#include <vector>

constexpr const char* kBlock = R"(
  program moe_block
  input x: tokens
  h: tokens = call norm(x)
  ids: ids, gates: weights = call router(h)
  sent = dispatch_send(h, ids, gates)
  shared: tokens = call shared_experts(h)
  rows = dispatch_receive(sent)
  routed: outputs = call experts(rows)
  y = combine(routed, rows, rows)
  z: tokens = call residual(x, shared, y)
  output z
)";
constexpr int kRanks = 2, kTokens = 7, kHidden = 32, kExperts = 8, kTopK = 2;

using ferry::ProgramInputs, ferry::ProgramOutputs;

const float* values_of(const ferry::ProgramValue* value) {
  return static_cast<const float*>(value->data);
}
float* values_of(ferry::ProgramValue* value) {
  return static_cast<float*>(value->data);
}

// An expert: silu(a * x) * b * x for each column, with factors that depend on the expert.
void expert(int number, const float* x, float* y) {
  for (int i = 0; i < kHidden; ++i) {
    const float a = x[i] * (0.5f + 0.125f * static_cast<float>(number)),
                b = x[i] * static_cast<float>(1 + i % 3);
    y[i] = a / (1 + std::exp(-a)) * b;
  }
}

void norm(ProgramInputs inputs, ProgramOutputs outputs) {
  for (std::int64_t row = 0; row < outputs[0]->rows; ++row) {
    const float* const x = values_of(inputs[0]) + row * kHidden;
    float squares = 1e-6f;
    for (int i = 0; i < kHidden; ++i) squares += x[i] * x[i];
    for (int i = 0; i < kHidden; ++i)
      values_of(outputs[0])[row * kHidden + i] = x[i] / std::sqrt(squares / kHidden);
  }
}

// The two experts with the highest scores, and the sigmoid of these.
void router(ProgramInputs inputs, ProgramOutputs outputs) {
  for (std::int64_t row = 0; row < outputs[0]->rows; ++row) {
    std::vector<std::pair<float, int>> scores;
    for (int e = 0; e < kExperts; ++e) {
      float score = 0;
      for (int i = 0; i < kHidden; ++i)
        score += values_of(inputs[0])[row * kHidden + i] * std::cos(static_cast<float>((e + 1) * (i + 1)));
      scores.emplace_back(score, e);
    }
    std::partial_sort(scores.begin(), scores.begin() + kTopK, scores.end(), std::greater());
    for (int k = 0; k < kTopK; ++k) {
      static_cast<int*>(outputs[0]->data)[row * kTopK + k] = scores[k].second;
      values_of(outputs[1])[row * kTopK + k] = 1 / (1 + std::exp(-scores[k].first));
    }
  }
}

void shared_experts(ProgramInputs inputs, ProgramOutputs outputs) {
  for (std::int64_t row = 0; row < outputs[0]->rows; ++row)
    expert(kExperts, values_of(inputs[0]) + row * kHidden, values_of(outputs[0]) + row * kHidden);
}

void experts(ProgramInputs inputs, ProgramOutputs outputs) {
  const ferry::DispatchResult& rows = inputs[0]->received;
  for (int group = 0; group < rows.groups; ++group)
    for (int row = rows.row_offsets[group]; row < rows.row_offsets[group + 1]; ++row)
      expert(rows.group_expert[group], static_cast<const float*>(rows.data) + row * kHidden,
             values_of(outputs[0]) + row * kHidden);
}

void residual(ProgramInputs inputs, ProgramOutputs outputs) {
  for (std::int64_t i = 0; i < outputs[0]->rows * kHidden; ++i)
    values_of(outputs[0])[i] = values_of(inputs[0])[i] + values_of(inputs[1])[i] + values_of(inputs[2])[i];
}

// The steps' names in the order in which they ran, those of parts and joins left out.
std::string order_of(const ferry::Program& program, const std::vector<std::size_t>& steps) {
  std::string text;
  for (const std::size_t step : steps)
    if (step < program.steps.size() && program.steps[step].kind != ferry::StepKind::part &&
        program.steps[step].kind != ferry::StepKind::join)
      text += "  " + program.steps[step].name() + "\n";
  return text;
}

void run(const ferry::Rank& rank) {
  const ferry::Program block = ferry::parse_program(kBlock), batched = overlap(block, 2);
  ferry::Exchange exchange(rank, {.experts = kExperts,
                                  .top_k = kTopK,
                                  .hidden = kHidden,
                                  .max_tokens = kTokens,
                                  .format = ferry::Format::fp32(),
                                  .combine_type = ferry::DType::fp32,
                                  .lanes = 2});
  const ferry::ProgramFunctions functions = {{"norm", norm},
                                             {"router", router},
                                             {"shared_experts", shared_experts},
                                             {"experts", experts},
                                             {"residual", residual}};
  ferry::Evaluator whole(block, exchange, functions), split(batched, exchange, functions);
  std::vector<std::size_t> ran;
  split.set_observer([&](std::size_t step, ferry::Stream) { ran.push_back(step); });

  std::vector<float> x(kTokens * kHidden);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i * (rank.index() + 1)));
  const std::vector inputs = {ferry::ProgramValue::tokens(x.data(), kTokens, ferry::DType::fp32)};
  const void* const z = whole.run(inputs)[0]->data;
  const void* const z2 = split.run(inputs)[0]->data;
  const bool same = std::memcmp(z, z2, x.size() * sizeof(float)) == 0;

  if (rank.index() == 0) std::printf("two micro-batches:\n%s", order_of(batched, ran).c_str());
  for (int r = 0; r < rank.size(); ++r, rank.barrier())  // print in rank order
    if (r == rank.index()) std::printf("rank %d: the same bytes: %s\n", r, same ? "yes" : "no");
}

int main() {
  ferry::Group::threads(kRanks).run(run);
}
