#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "backends/cuda/runtime/error.hpp"
#include "backends/cuda/runtime/stream.hpp"
#include "ferry/error.hpp"
#include "tools/ferry/limits/gpu_limits.hpp"

namespace ferry::app {

namespace {

using cuda::check;
using Clock = std::chrono::steady_clock;

// The driver reads these when it starts. Ranks that share a GPU need a hardware queue per stream, and loading
// a module while kernels wait for each other would deadlock.
const bool environment_set = [] {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  return true;
}();

constexpr int kMostRanks = 32;
constexpr int kRowBytes = 14336;          // a token of 7168 bf16 columns
constexpr int kVectors = kRowBytes / 16;  // 16-byte accesses per row
constexpr int kRows = 2048;               // pushed by a rank per round
constexpr int kRounds = 10;
constexpr int kThreads = 1024;
constexpr int kLoadsInFlight = 7;  // per thread
constexpr int kSignals = 10000;    // per measurement

struct Pointers {
  char* at[kMostRanks];
};

// Release and acquire at system scope, because other GPUs write the flags and the host writes the start gate.
__device__ void set_flag(int* flag, int value) {
  asm volatile("st.release.sys.global.s32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}
__device__ int load_flag(const int* flag) {
  int value;
  asm volatile("ld.acquire.sys.global.s32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}
__device__ void wait_for(const int* flag, int value) {
  while (load_flag(flag) < value) {
  }
}
__device__ void wait_for_host(const int* gate) {
  if (threadIdx.x == 0) wait_for(gate, 1);
  __syncthreads();
}

// Writes rows to the other ranks in turn; each warp copies whole rows.
__global__ void __launch_bounds__(kThreads)
    push_rows(Pointers staging, const char* source, int rank, int ranks, const int* gate) {
  wait_for_host(gate);
  const int warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, warps = gridDim.x * blockDim.x / 32;
  for (int round = 0; round < kRounds; ++round) {
    for (int row = warp; row < kRows; row += warps) {
      const int peer = (rank + 1 + row % (ranks - 1)) % ranks;
      const auto* from = reinterpret_cast<const int4*>(source + std::int64_t{row} * kRowBytes);
      auto* to = reinterpret_cast<int4*>(staging.at[peer] + (std::int64_t{rank} * kRows + row) * kRowBytes);
      for (int first = threadIdx.x % 32; first < kVectors; first += 32 * kLoadsInFlight) {
        int4 piece[kLoadsInFlight];
#pragma unroll
        for (int i = 0; i < kLoadsInFlight; ++i)
          if (first + 32 * i < kVectors) piece[i] = from[first + 32 * i];
#pragma unroll
        for (int i = 0; i < kLoadsInFlight; ++i)
          if (first + 32 * i < kVectors) to[first + 32 * i] = piece[i];
      }
    }
  }
}

__global__ void ping_pong(int* own_flag, int* peer_flag, bool first, const int* gate) {
  wait_for_host(gate);
  for (int signal = 1; signal <= kSignals; ++signal) {
    if (first) set_flag(peer_flag, signal);
    wait_for(own_flag, signal);
    if (!first) set_flag(peer_flag, signal);
  }
}

__global__ void barrier(Pointers flags, int rank, int ranks, const int* gate) {
  wait_for_host(gate);
  for (int signal = 1; signal <= kSignals; ++signal) {
    if (threadIdx.x < ranks) {
      set_flag(reinterpret_cast<int*>(flags.at[threadIdx.x]) + rank, signal);
      wait_for(reinterpret_cast<int*>(flags.at[rank]) + threadIdx.x, signal);
    }
    __syncthreads();
  }
}

__global__ void empty() {}

int gpus() {
  int count = 0;
  check(cudaGetDeviceCount(&count), "count the GPUs");
  return count;
}

void enable_peer_access(int device, int devices) {
  for (int peer = 0; peer < devices; ++peer) {
    if (peer == device) continue;
    const cudaError_t status = cudaDeviceEnablePeerAccess(peer, 0);
    if (status != cudaErrorPeerAccessAlreadyEnabled) check(status, "enable peer access between GPUs");
    cudaGetLastError();  // clears "already enabled"
  }
}

// Memory and streams of all ranks, driven by one thread. Kernels of all ranks begin together, when the host
// opens a gate.
class GpuRanks {
 public:
  GpuRanks(int ranks, std::int64_t bytes) : ranks_(ranks), devices_(gpus()) {
    if (ranks > kMostRanks) throw UsageError("limits of GPUs: at most 32 ranks can be measured");
    check(cudaHostAlloc(&gate_, sizeof(int), cudaHostAllocPortable | cudaHostAllocMapped), "pin memory");
    for (int rank = 0; rank < ranks; ++rank) {
      use(rank);
      enable_peer_access(rank % devices_, devices_);
      check(cudaMalloc(&memory_.at[rank], static_cast<std::size_t>(bytes)), "allocate device memory");
      check(cudaMemset(memory_.at[rank], 0, static_cast<std::size_t>(bytes)), "clear device memory");
      streams_[rank] = std::make_unique<cuda::CudaStream>();
    }
    wait();
  }
  ~GpuRanks() {
    for (int rank = 0; rank < ranks_; ++rank) {
      cudaSetDevice(rank % devices_);
      streams_[rank].reset();
      cudaFree(memory_.at[rank]);
    }
    cudaFreeHost(gate_);
  }
  GpuRanks(const GpuRanks&) = delete;
  GpuRanks& operator=(const GpuRanks&) = delete;

  void use(int rank) const { check(cudaSetDevice(rank % devices_), "select a GPU"); }
  const Pointers& memory() const { return memory_; }
  cudaStream_t stream(int rank) const { return streams_[rank]->get(); }
  const int* gate() const { return gate_; }

  // Launches a kernel on every rank; returns the seconds from opening the gate to the end of the last kernel.
  template <class Launch>
  double time(Launch launch) const {
    *static_cast<volatile int*>(gate_) = 0;
    for (int rank = 0; rank < ranks_; ++rank) {
      use(rank);
      launch(rank);
      check(cudaGetLastError(), "launch a measuring kernel");
    }
    const Clock::time_point start = Clock::now();
    *static_cast<volatile int*>(gate_) = 1;
    wait();
    return std::chrono::duration<double>(Clock::now() - start).count();
  }

 private:
  void wait() const {
    for (int rank = 0; rank < ranks_; ++rank) {
      use(rank);
      check(cudaDeviceSynchronize(), "wait for a GPU");
    }
  }

  const int ranks_, devices_;
  int* gate_ = nullptr;
  Pointers memory_{};
  std::unique_ptr<cuda::CudaStream> streams_[kMostRanks];
};

}  // namespace

std::vector<std::string> gpu_names() {
  std::vector<std::string> names;
  for (int device = 0; device < gpus(); ++device) {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, device), "read the name of a GPU");
    names.emplace_back(properties.name);
  }
  return names;
}

int gpu_sms() {
  int sms = 0;
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0), "count SMs");
  return sms;
}

double measure_push(int ranks, int sms) {
  if (ranks < 2) return 0;
  constexpr std::int64_t kPushedBytes = std::int64_t{kRows} * kRowBytes;
  const GpuRanks all(ranks, (ranks + 1) * kPushedBytes);  // rows from every rank, and the rank's own rows
  double best = 0;
  for (int repeat = 0; repeat < 3; ++repeat) {  // the first warms up
    const double seconds = all.time([&](int rank) {
      push_rows<<<sms, kThreads, 0, all.stream(rank)>>>(
          all.memory(), all.memory().at[rank] + ranks * kPushedBytes, rank, ranks, all.gate());
    });
    best = std::max(best, static_cast<double>(kPushedBytes) * kRounds / seconds);
  }
  return best;
}

double measure_gpu_flag() {
  const GpuRanks two(2, 4096);
  const auto flag = [&](int rank) { return reinterpret_cast<int*>(two.memory().at[rank]); };
  return two.time([&](int rank) {
    ping_pong<<<1, 1, 0, two.stream(rank)>>>(flag(rank), flag(1 - rank), rank == 0, two.gate());
  }) / kSignals /
         2;
}

double measure_gpu_barrier(int ranks) {
  const GpuRanks all(ranks, 4096);
  return all.time([&](int rank) {
    barrier<<<1, 32, 0, all.stream(rank)>>>(all.memory(), rank, ranks, all.gate());
  }) / kSignals;
}

double measure_launch(int blocks) {
  constexpr int kNodes = 100, kReplays = 20;
  const GpuRanks one(1, 4096);
  one.use(0);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  check(cudaStreamBeginCapture(one.stream(0), cudaStreamCaptureModeThreadLocal), "capture a graph");
  for (int node = 0; node < kNodes; ++node) empty<<<blocks, 32, 0, one.stream(0)>>>();
  check(cudaStreamEndCapture(one.stream(0), &graph), "capture a graph");
  const cudaError_t status = cudaGraphInstantiate(&executable, graph, 0);
  cudaGraphDestroy(graph);
  check(status, "instantiate a graph");
  double best = 1;
  for (int repeat = 0; repeat < 3; ++repeat) {
    best = std::min(best, one.time([&](int) {
      for (int replay = 0; replay < kReplays; ++replay)
        check(cudaGraphLaunch(executable, one.stream(0)), "launch a graph");
    }));
  }
  cudaGraphExecDestroy(executable);
  return best / (kNodes * kReplays);
}

}  // namespace ferry::app
