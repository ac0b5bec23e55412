// One exchange made through the C interface and one through the C++ interface, alike.
#pragma once

#include "capi/convert.hpp"
#include "capi/inputs.hpp"
#include "capi/run.hpp"
#include "harness/harness.hpp"

namespace ferry::capi_test {

inline constexpr int kRanks = 3;

// The two exchanges on one rank, with the same configuration and the same inputs.
struct Pair {
  // `fewest`: tokens of the rank at least.
  Pair(ferry_rank* rank, const ferry_config& config, int fewest = 0)
      : c(make_exchange(rank, config)),
        cpp(rank->rank, capi::to_config(config, rank->rank.size())),
        random(contract::seed_of(100 + static_cast<std::uint64_t>(rank->rank.index()))),
        in(config, random, fewest),
        args(sized<ferry_dispatch_args>()),
        rows(sized<ferry_dispatch_result>()),
        tokens(Tokens::rows(in.values.data(), in.count)) {
    args.tokens.parts[0] = in.values.data();
    args.tokens.count = in.count;
    args.ids = in.ids.data();
    args.weights = in.weights.data();
    args.result = &rows;
  }

  ExchangeHandle c;
  Exchange cpp;
  contract::Random random;
  Inputs in;
  ferry_dispatch_args args;
  ferry_dispatch_result rows;
  Tokens tokens;
};

}  // namespace ferry::capi_test
