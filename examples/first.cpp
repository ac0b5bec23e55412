// Eight ranks send their tokens to experts that double them, and sum what returns.
#include <cstdio>
#include <ferry/ferry.hpp>
#include <vector>

int main() {
  constexpr int kTokens = 4, kHidden = 8, kTopK = 2;
  ferry::Group::threads(8).run([](const ferry::Rank& rank) {
    ferry::Exchange exchange(rank, {.experts = 16,
                                    .top_k = kTopK,
                                    .hidden = kHidden,
                                    .max_tokens = kTokens,
                                    .format = ferry::Format::fp32(),
                                    .combine_type = ferry::DType::fp32});
    std::vector<float> tokens(kTokens * kHidden, 1.0f + rank.index()), result(tokens.size());
    std::vector<int> ids = {0, 15, 3, 8, 7, 2, 9, 4};  // two experts a token
    std::vector<float> weights(ids.size(), 0.25f);

    auto input = ferry::Tokens::rows(tokens.data(), kTokens, ferry::DType::fp32);
    auto rows = exchange.dispatch(input, ids.data(), weights.data());
    auto* values = static_cast<float*>(rows.data);
    for (int i = 0; i < *rows.total * kHidden; ++i) values[i] *= 2;  // the experts
    exchange.combine({values, ferry::DType::fp32}, rows.plan, {result.data(), ferry::DType::fp32},
                     {.row_weights = rows.weight});

    for (int r = 0; r < rank.size(); ++r, rank.barrier())  // print in rank order
      if (r == rank.index()) std::printf("rank %d: %d rows received, y = %g\n", r, *rows.total, result[0]);
  });
}
