// A program of dispatch, experts and combine for top-1, built step by step, on the ranks that mpirun has
// started:
//
//   mpirun -n 2 top_1_mpi
//
// Every rank sends its tokens to the experts that their ids choose, one expert on each rank. Expert e
// multiplies by e + 2.
#include <cstdio>
#include <ferry/ferry.hpp>
#include <vector>

constexpr int kTokens = 6, kHidden = 16;

ferry::Program top_1() {
  using Step = ferry::StepKind;
  using Value = ferry::ValueKind;
  return {.name = "top_1",
          .inputs = {{"x", Value::tokens}, {"expert", Value::ids}},
          .steps = {{.kind = Step::dispatch, .inputs = {"x", "expert"}, .outputs = {{"rows"}}},
                    {.kind = Step::call,
                     .inputs = {"rows"},
                     .outputs = {{"y", Value::outputs}},
                     .function = "experts"},
                    {.kind = Step::combine, .inputs = {"y", "rows"}, .outputs = {{"result"}}}},
          .outputs = {"result"}};
}

void experts(ferry::ProgramInputs inputs, ferry::ProgramOutputs outputs) {
  const ferry::DispatchResult& rows = inputs[0]->received;
  const auto* const x = static_cast<const float*>(rows.data);
  auto* const y = static_cast<float*>(outputs[0]->data);
  for (int group = 0; group < rows.groups; ++group)
    for (int i = rows.row_offsets[group] * kHidden; i < rows.row_offsets[group + 1] * kHidden; ++i)
      y[i] = x[i] * static_cast<float>(rows.group_expert[group] + 2);
}

// How many of this rank's values are not what its tokens' experts make of them.
int wrong_values(const ferry::Rank& rank) {
  ferry::Exchange exchange(rank, {.experts = rank.size(),
                                  .top_k = 1,
                                  .hidden = kHidden,
                                  .max_tokens = kTokens,
                                  .backend = ferry::BackendKind::collective,
                                  .format = ferry::Format::fp32(),
                                  .combine_type = ferry::DType::fp32});
  ferry::Evaluator layer(top_1(), exchange, {{"experts", experts}});
  std::vector<float> x(kTokens * kHidden);
  std::vector<int> expert(kTokens);
  for (int token = 0; token < kTokens; ++token) expert[token] = (rank.index() + token) % rank.size();
  for (std::size_t i = 0; i < x.size(); ++i)
    x[i] = static_cast<float>(rank.index()) + 0.25f * static_cast<float>(i);

  const std::vector inputs = {ferry::ProgramValue::tokens(x.data(), kTokens, ferry::DType::fp32),
                              ferry::ProgramValue::ids(expert.data(), kTokens)};
  const auto* const result = static_cast<const float*>(layer.run(inputs)[0]->data);
  int wrong = 0;
  for (int i = 0; i < kTokens * kHidden; ++i)
    wrong += result[i] != x[i] * static_cast<float>(expert[i / kHidden] + 2);
  return wrong;
}

int main() {
  ferry::Group::mpi().run([](const ferry::Rank& rank) {
    const int wrong = wrong_values(rank);
    std::vector<int> all(rank.size());
    rank.all_gather(&wrong, all.data(), sizeof wrong);
    if (rank.index() != 0) return;
    std::printf("%s", to_string(top_1()).c_str());
    for (int r = 0; r < rank.size(); ++r) std::printf("# rank %d: %d wrong values\n", r, all[r]);
  });
}
