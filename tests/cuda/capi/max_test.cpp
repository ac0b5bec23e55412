// The call shapes of MAX on device memory through the C interface: eager calls, phases, and graphs whose
// replays read N and the ids anew. Every expert returns its input, so the results are known.
#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#include "capi/boundary.hpp"
#include "cuda/device_test.hpp"

namespace ferry::contract {
namespace {

using CudaMaxInC = DeviceTest;

void require_ok(ferry_status status, const char* what) {
  require(status == FERRY_OK, what, ": ", ferry_last_error());
}

// A struct with its size set and zeros otherwise.
template <class T>
T sized() {
  T value{};
  value.size = sizeof value;
  return value;
}

template <class T>
std::vector<T> on_host(const T* device, std::size_t count, cudaStream_t stream) {
  std::vector<T> values(count);
  require_success(cudaMemcpyAsync(values.data(), device, count * sizeof(T), cudaMemcpyDeviceToHost, stream),
                  "cudaMemcpyAsync");
  require_success(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  return values;
}

// Ranks 0 and 1 with three experts each, and a shared expert.
struct MaxInputs {
  static constexpr int kTopK = 2, kHidden = 8, kTokens = 4;  // T

  explicit MaxInputs(int rank)
      : ids(rank == 0 ? std::vector<std::int32_t>{3, 5, 5, 0} : std::vector<std::int32_t>{5, 3, -1, 1}),
        values(static_cast<std::size_t>(kTokens * kHidden)) {
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<float>(100 * rank) + static_cast<float>(i / kHidden);
    ids.resize(static_cast<std::size_t>(kTokens * kTopK), -1);
    weights.resize(ids.size());
  }
  // The first `tokens` results: the weights of kept slots, and 1 for the shared expert.
  std::vector<float> results(int tokens) const {
    std::vector<float> expected;
    for (std::size_t i = 0; i < static_cast<std::size_t>(tokens * kHidden); ++i) {
      const std::size_t token = i / kHidden;
      float sum = 0;
      for (std::size_t k = token * kTopK; k < (token + 1) * kTopK; ++k)
        if (ids[k] >= 0) sum += weights[k] * values[i];
      expected.push_back(sum + values[i]);
    }
    return expected;
  }

  std::vector<std::int32_t> ids;
  std::vector<float> values, weights = {0.5f, 0.25f, 2, 1};
};

class MaxRank {
 public:
  explicit MaxRank(const Rank& rank) : me_(rank.index()), inputs_(me_), handle_{rank} {
    auto config = sized<ferry_config>();
    config.experts = 6;
    config.top_k = MaxInputs::kTopK;
    config.hidden = MaxInputs::kHidden;
    config.max_tokens = MaxInputs::kTokens;
    config.shared_experts = 1;
    config.backend = FERRY_CUDA;
    config.format.kind = FERRY_FORMAT_FP32;
    config.combine_type = FERRY_FP32;
    config.deadline = 4;
    ferry_max_exchange* made = nullptr;
    require_ok(ferry_max_exchange_create(&handle_, &config, &made), "create");
    exchange_.reset(made);
  }

  ferry_max_exchange* exchange() const { return exchange_.get(); }
  cudaStream_t stream() const { return stream_.get(); }

  ferry_max_dispatch_args dispatch_args() {
    auto args = sized<ferry_max_dispatch_args>();
    args.input_tokens.parts[0] = values_.data();
    args.input_tokens.count = 2;
    args.input_tokens.type = FERRY_FP32;
    args.topk_ids = ids_.data();
    args.call = call();
    args.result = &received_;
    return args;
  }
  ferry_max_combine_args combine_args() const {
    auto args = sized<ferry_max_combine_args>();
    args.input_tokens = {.data = const_cast<void*>(received_.output_tokens),
                         .stride = 0,
                         .type = FERRY_FP32,
                         .rows = 0,
                         .reserved = {}};
    args.src_info = received_.src_info;
    args.row_offsets = received_.row_offsets;
    args.counts = received_.counts;
    args.output_tokens = {.data = result_.data(), .stride = 0, .type = FERRY_FP32, .rows = 0, .reserved = {}};
    args.router_weights = weights_.as<float>();
    args.call = call();
    return args;
  }
  void poison() const { result_.poison(stream()); }
  ferry_call_options call() const { return {.lane = 0, .sm_limit = 0, .stream = stream(), .reserved = {}}; }
  void synchronize() const {
    const ferry_call_options on_stream = call();
    require_ok(ferry_max_synchronize(exchange(), &on_stream), "synchronize");
  }
  void compare(int tokens, float scale = 1, bool adds_values = false) const {
    synchronize();
    std::vector<float> expected = inputs_.results(tokens);
    for (std::size_t i = 0; i < expected.size(); ++i)
      expected[i] = scale * expected[i] + (adds_values ? inputs_.values[i] : 0.0f);
    require(on_host(result_.as<float>(), expected.size(), stream()) == expected, "result of ", tokens,
            " tokens");
  }
  // Compares the rows that rank `me_` receives of two tokens of each rank.
  void compare_received() const {
    synchronize();
    require(received_.groups == 4 && received_.ranks == 2, "groups or ranks");
    const auto stats = on_host(received_.expert_usage_stats, 2, stream());
    const std::size_t number = stats[1];
    const auto offsets = on_host(received_.row_offsets, 5, stream());
    const auto ids = on_host(received_.expert_ids, 4, stream());
    using Offsets = std::vector<std::uint32_t>;
    using Numbers = std::vector<std::int32_t>;
    require(number == 3, "number");
    require(offsets == (me_ == 0 ? Offsets{0, 2, 3, 4, 4} : Offsets{0, 2, 4, 7, 7}), "row_offsets");
    require(ids == (me_ == 0 ? Numbers{0, 1, 2, -1} : Numbers{0, 1, 3, -1}), "expert_ids");
    require(
        on_host(received_.src_info, 2 * std::size_t{offsets[number]}, stream()) ==
            (me_ == 0 ? Numbers{0, 2, 1, 2, 1, 1, 1, 1} : Numbers{0, 2, 1, 2, 0, 0, 0, 1, 0, 1, 1, 0, 0, 0}),
        "src_info");
  }
  void set_tokens(int tokens) const {
    require_success(cudaMemcpyAsync(count_.data(), &kCounts[static_cast<std::size_t>(tokens)], 4,
                                    cudaMemcpyHostToDevice, stream()),
                    "cudaMemcpyAsync");
  }
  const std::int32_t* count() const { return count_.as<std::int32_t>(); }
  float* values() const { return values_.as<float>(); }
  ferry_max_dispatch_result* received() { return &received_; }

 private:
  static constexpr std::array<std::int32_t, 3> kCounts{0, 1, 2};

  int me_;
  MaxInputs inputs_;
  ferry_rank handle_;
  std::unique_ptr<ferry_max_exchange, void (*)(ferry_max_exchange*)> exchange_{nullptr,
                                                                               ferry_max_exchange_destroy};
  TestStream stream_;
  DeviceBytes values_{bytes_of_values(inputs_.values)}, ids_{bytes_of_values(inputs_.ids)},
      weights_{bytes_of_values(inputs_.weights)}, result_{4 * MaxInputs::kTokens * MaxInputs::kHidden},
      count_{4};
  ferry_max_dispatch_result received_ = sized<ferry_max_dispatch_result>();
};

TestCase named(std::uint64_t number) {
  TestCase c;
  c.seed = number;
  c.ranks = 2;
  c.config.backend = BackendKind::cuda;
  return c;
}

TEST_F(CudaMaxInC, FusedInPhasesAndWithAnEpilogue) {
  run(2, named(1), [](Rank rank) {
    MaxRank max(rank);
    auto dispatch = max.dispatch_args();
    max.poison();
    require_ok(ferry_max_ep_fused_dispatch(max.exchange(), &dispatch), "fused dispatch");
    max.compare_received();
    auto combine = max.combine_args();
    require_ok(ferry_max_ep_fused_combine(max.exchange(), &combine), "fused combine");
    max.compare(2);

    max.poison();
    dispatch.result = nullptr;
    require_ok(ferry_max_ep_dispatch_async(max.exchange(), &dispatch), "dispatch async");
    require_ok(ferry_max_ep_dispatch_wait(max.exchange(), &dispatch.call, max.received()), "dispatch wait");
    max.compare_received();
    combine = max.combine_args();
    const ferry_epilogue epilogue{
        .size = sizeof(ferry_epilogue), .residual = max.values(), .stride = 0, .scale = 2};
    combine.epilogue = &epilogue;
    combine.own_ids = 1;
    combine.topk_ids = dispatch.topk_ids;
    combine.tokens = 2;
    require_ok(ferry_max_ep_combine_async(max.exchange(), &combine), "combine async");
    require_ok(ferry_max_ep_combine_wait(max.exchange(), &combine.call), "combine wait");
    max.compare(2, 2, true);
    require_ok(ferry_max_check(max.exchange(), 0), "check");
  });
}

TEST_F(CudaMaxInC, GraphsReadTheCurrentNumberOfTokens) {
  run(2, named(2), [](Rank rank) {
    MaxRank max(rank);
    auto dispatch = max.dispatch_args();
    dispatch.input_tokens.count = MaxInputs::kTokens;
    dispatch.input_tokens.device_count = max.count();
    const auto call = [&] {
      require_ok(ferry_max_ep_fused_dispatch(max.exchange(), &dispatch), "dispatch");
      const auto combine = max.combine_args();
      require_ok(ferry_max_ep_fused_combine(max.exchange(), &combine), "combine");
    };
    max.set_tokens(2);
    call();
    max.compare(2);
    rank.barrier();
    const Graph graph(max.stream(), call);
    rank.barrier();
    for (const int tokens : {1, 2, 0, 2}) {
      max.set_tokens(tokens);
      max.poison();
      graph.launch(max.stream());
      max.compare(tokens);
    }
  });
}

}  // namespace
}  // namespace ferry::contract
