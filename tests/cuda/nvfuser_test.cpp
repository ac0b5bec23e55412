// nvFuser's call shapes in GPU memory: over the backend cuda, and over NCCL between two GPUs, on one node and
// as two.
#include "ferry/nvfuser.hpp"

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cuda/device_resources.hpp"
#include "cuda/device_test.hpp"
#include "ferry/error.hpp"
#include "format/numbers.hpp"
#include "nvfuser/random_step.hpp"
#include "seed.hpp"

namespace ferry::contract {
namespace {

template <class T>
DeviceBytes on_gpu(const std::vector<T>& values) {
  std::vector<std::byte> bytes(values.size() * sizeof(T));
  if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return DeviceBytes(bytes);
}

template <class T>
std::vector<T> from_gpu(const void* data, std::int64_t count) {
  std::vector<T> values(static_cast<std::size_t>(count));
  require_success(cudaMemcpyAsync(values.data(), data, values.size() * sizeof(T), cudaMemcpyDeviceToHost,
                                  cudaStreamPerThread),
                  "cudaMemcpyAsync");
  require_success(cudaStreamSynchronize(cudaStreamPerThread), "cudaStreamSynchronize");
  return values;
}

class CudaNvfuser : public DeviceTest {
 protected:
  // Ranks as threads, each on a GPU of its own where there are several.
  static void run_on_gpus(const Topology& topology, const std::function<void(const Rank&)>& body) {
    Group group = Group::threads(topology);
    group.set_deadline(60);
    group.run([&](const Rank& rank) {
      const int number = rank.index() % device::count();
      const device::RankScope scope(number);
      make_streams(rank, number);
      body(rank);
    });
  }

  // Dispatches and combines into memory of the exchange and of the caller.
  static void check_step(const Rank& rank, const test::Step& step, Config config) {
    config.experts = step.experts;
    config.top_k = step.top_k;
    config.hidden = test::kHidden;
    config.max_tokens = 8;
    config.format = Format::fp32();
    nvfuser::Exchange exchange(rank, config);
    const int me = rank.index();
    const Stream stream = device::stream(me % device::count());
    const std::int64_t count = step.count(me), row_bytes = 4 * test::kHidden;
    const DeviceBytes x = on_gpu(step.tokens[me]), ids = on_gpu(step.ids[me]),
                      memory(exchange.capacity() * row_bytes), outputs(exchange.capacity() * row_bytes),
                      result(count * row_bytes);
    rank.barrier();  // no memory is allocated while the kernels of a peer on the same device wait
    for (const bool own : {false, true}) {
      const auto received =
          exchange.dispatch(Tokens::rows(x.as<const float>(), count, DType::fp32),
                            ids.as<const std::int64_t>(), {own ? memory.data() : nullptr, stream});
      EXPECT_EQ(received.recv_x == memory.data(), own);
      std::vector<float> rows =
          from_gpu<float>(received.recv_x, std::ssize(received.recv_src_idx) * test::kHidden);
      test::check_dispatch(step, me, received, rows.data());
      for (float& value : rows) value = test::expert(value, me);
      require_success(cudaMemcpyAsync(outputs.data(), rows.data(), rows.size() * sizeof(float),
                                      cudaMemcpyHostToDevice, cudaStreamPerThread),
                      "cudaMemcpyAsync");
      result.poison(cudaStreamPerThread);
      from_gpu<std::byte>(result.data(), 0);  // waits
      exchange.combine({outputs.data(), received}, count, result.data(), stream);
      const std::vector<float> y = from_gpu<float>(result.data(), count * test::kHidden);
      for (std::size_t i = 0; i < y.size(); ++i) {
        float sum = 0;
        for (const auto target : step.targets(me, static_cast<std::int64_t>(i) / test::kHidden))
          sum += test::expert(step.tokens[me][i], target);
        EXPECT_EQ(y[i], sum) << "rank " << me << ", value " << i;
      }
      rank.barrier();  // no memory is freed while a peer's kernels wait
    }
  }

  static void check_steps(const Topology& topology, const Config& config) {
    std::mt19937_64 random(test::seed());
    for (int top_k = 1; top_k <= 3; ++top_k) {
      const test::Step step(random, topology.ranks(), top_k);
      run_on_gpus(topology, [&](const Rank& rank) { check_step(rank, step, config); });
    }
  }
};

TEST_F(CudaNvfuser, RandomIdsAgreeWithALoop) {
  for (const int ranks : {2, 3})
    check_steps(Topology(std::vector<int>(ranks, 0)), {.backend = BackendKind::cuda});
}

TEST_F(CudaNvfuser, OverNccl) {
  if (device::count() < 2) GTEST_SKIP() << "NCCL needs a GPU for each rank";
  const Config config{
      .backend = BackendKind::collective, .engine = EngineKind::nccl, .memory = MemoryKind::device};
  check_steps(Topology({0, 0}), config);
  for (const Hops hops : {Hops::one, Hops::two}) {
    Config between_nodes = config;
    between_nodes.hops = hops;
    check_steps(Topology({0, 1}), between_nodes);
  }
}

// Every type, with sums that round and a NaN.
TEST_F(CudaNvfuser, SumsAreRoundedOnce) {
  for (const Format& format : {Format::bf16(), Format::fp16(), Format::fp32()}) {
    const DType type = *format.value_type();
    const auto bits = [&](float value) -> std::uint32_t {
      return type == DType::fp32   ? bits_of(value)
             : type == DType::bf16 ? fp32_to_bf16(value)
                                   : fp32_to_fp16(value);
    };
    const auto bytes = [&](float value, float last) {
      std::vector<std::byte> row;
      for (int column = 0; column < 8; ++column) {
        const std::uint32_t word = bits(column == 7 ? last : value);
        const auto* first = reinterpret_cast<const std::byte*>(&word);
        row.insert(row.end(), first, first + bytes_of(type));
      }
      return row;
    };
    const float nan = float_of(0xFFC01234u);
    run_on_gpus(Topology({0, 0}), [&](const Rank& rank) {
      nvfuser::Exchange exchange(rank, {.experts = 2,
                                        .top_k = 2,
                                        .hidden = 8,
                                        .max_tokens = 1,
                                        .backend = BackendKind::cuda,
                                        .format = format});
      const DeviceBytes x(bytes(1, 1)), ids = on_gpu(std::vector<std::int64_t>{0, 1}),
                                        result(8 * bytes_of(type));
      const auto received = exchange.dispatch(Tokens::rows(x.data(), 1, type), ids.as<const std::int64_t>());
      std::vector<std::byte> rows = rank.index() == 0 ? bytes(256, nan) : bytes(1.5f, 1);
      rows.insert(rows.end(), rows.begin(), rows.end());  // of both source ranks
      const DeviceBytes outputs(rows);
      exchange.combine({outputs.data(), received}, 1, result.data());
      EXPECT_EQ(from_gpu<std::byte>(result.data(), result.bytes()),
                bytes(257.5f, type == DType::fp32 ? float_of(0x7FFFFFFFu) : nan))
          << to_string(format);
      rank.barrier();
    });
  }
}

// On every rank, and the exchange stays usable.
TEST_F(CudaNvfuser, ResultsThatKernelsCannotWriteAreRefused) {
  std::mt19937_64 random(test::seed());
  const test::Step step(random, 2, 1);
  run_on_gpus(Topology({0, 0}), [&](const Rank& rank) {
    nvfuser::Exchange exchange(rank, {.experts = step.experts,
                                      .top_k = 1,
                                      .hidden = test::kHidden,
                                      .max_tokens = 8,
                                      .backend = BackendKind::cuda,
                                      .format = Format::fp32()});
    const int me = rank.index();
    const DeviceBytes x = on_gpu(step.tokens[me]), ids = on_gpu(step.ids[me]), result(16 * 8);
    const auto dispatch = [&] {
      return exchange.dispatch(Tokens::rows(x.as<const float>(), step.count(me), DType::fp32),
                               ids.as<const std::int64_t>());
    };
    const auto received = dispatch();
    std::vector<std::byte> pageable(16 * 8);
    for (std::byte* const wrong : {pageable.data(), result.data() + 4}) {
      try {
        exchange.combine({received.recv_x, received}, step.count(me), me == 0 ? wrong : result.data());
        ADD_FAILURE() << "not refused";
      } catch (const UsageError& error) {
        EXPECT_NE(std::string(error.what()).find("rank 0: result: "), std::string::npos) << error.what();
      }
    }
    exchange.combine({received.recv_x, received}, step.count(me), result.data());
    rank.barrier();
  });
}

}  // namespace
}  // namespace ferry::contract
