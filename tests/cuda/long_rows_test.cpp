// Rows of one piece of a warp's stream, of two and of more, in every format that quantises, with enough
// tokens that a warp sends whole rows, one after the other.
#include <string>
#include <utility>

#include "cuda/device_test.hpp"

namespace ferry::contract {
namespace {

using CudaLongRows = DeviceTest;

TEST_F(CudaLongRows, OfManyTokensInEveryFormat) {
  std::uint64_t number = 0;
  for (const char* format : {"fp8", "fp8-pow2-packed", "mxfp8", "mxfp4-up", "nvfp4", "nvfp4-token"}) {
    const bool nvfp4 = std::string(format).starts_with("nvfp4");
    for (const auto& [hidden, type] : {std::pair{7168, DType::bf16},
                                       {3616, DType::fp16},
                                       {3584, DType::bf16},
                                       {7200, DType::bf16},
                                       {3584, DType::fp32}}) {
      if (!nvfp4 && hidden != 7168 && hidden != 3616) continue;
      TestCase c = device_case(++number, 2);
      c.config.format = parse_format(format);
      c.config.hidden = hidden;
      c.config.max_tokens = 260;
      c.config.top_k = 1;
      c.sm_limit = 16;  // so that a warp sends several rows
      c.type = type;
      c.full = true;
      c.any_bits = number % 2 == 0;  // rows with infinities and NaN among them
      run(c.ranks, c, [&](Rank rank) {
        ferry::Exchange exchange(rank, c.config);
        DeviceRun device_run(exchange, c);
        add_steps(device_run, c, 1);
        const TestStream stream;
        device_run.run_and_compare(0, stream.get());
      });
    }
  }
}

}  // namespace
}  // namespace ferry::contract
