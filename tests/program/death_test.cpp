// A rank that dies inside a function of a program.
#include <gtest/gtest.h>

#include <array>
#include <csignal>
#include <string>
#include <vector>

#include "ferry/error.hpp"
#include "ferry/evaluator.hpp"
#include "runtime/shared_value.hpp"

namespace ferry::test {
namespace {

TEST(ProgramDeath, EndsTheRunOfTheOthersAtTheStepThatNeedsTheRank) {
  const SharedValue<std::array<char, 200>> found;
  const Program program = overlap(parse_program(R"(
    program moe
    input x: tokens
    input ids: ids
    rows = dispatch(x, ids)
    out: outputs = call experts(rows)
    y = combine(out, rows)
    output y
  )"),
                                  2);
  EXPECT_THROW(Group::processes(3).run([&](const Rank& rank) {
    Exchange exchange(rank, {.experts = 3,
                             .top_k = 1,
                             .hidden = 4,
                             .max_tokens = 4,
                             .format = Format::fp32(),
                             .combine_type = DType::fp32,
                             .lanes = 2});
    Evaluator layer(program, exchange, {{"experts", [&](auto inputs, auto outputs) {
                                           if (rank.index() == 1) std::raise(SIGKILL);
                                           outputs[0]->data = inputs[0]->received.data;
                                         }}});
    const std::vector<float> x(16, 1.0f);
    const std::vector<std::int32_t> ids = {0, 1, 2, 0};
    const auto given = {ProgramValue::tokens(x.data(), 4, DType::fp32), ProgramValue::ids(ids.data(), 4)};
    try {
      layer.run(std::span(given));
    } catch (const PeerLostError& error) {
      if (rank.index() == 0) std::string(error.what()).copy(found->data(), found->size() - 1);
      throw;
    }
  }),
               PeerLostError);
  // The receive phase needs the dead rank's rows. A send phase that begins after the death ends at once.
  const std::string text = found->data();
  EXPECT_TRUE(text.starts_with("program moe, step y.0 (combine_receive): ") ||
              text.starts_with("program moe, step y.sent.0 (combine_send): "))
      << text;
}

}  // namespace
}  // namespace ferry::test
