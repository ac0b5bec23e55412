#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "backends/cuda/host/error.hpp"
#include "ferry/error.hpp"
#include "tools/ferry/limits/gpu_probes.hpp"

namespace ferry::app {

namespace {

using cuda::check;
using Clock = std::chrono::steady_clock;

// Read by the driver when it starts: ranks that share a GPU need a queue for every stream, and no module may
// be loaded while kernels wait.
const bool environment_set = [] {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  return true;
}();

constexpr int kMostRanks = 32;
constexpr int kRowBytes = 14336;  // of a token of 7168 bf16 columns
constexpr int kUnits = kRowBytes / 16;
constexpr int kRows = 2048;  // a rank pushes in a round
constexpr int kRounds = 10;
constexpr int kThreads = 1024;
constexpr int kInFlight = 7;  // loads of a thread
constexpr int kTurns = 10000;

struct Pointers {
  char* at[kMostRanks];
};

// Release and acquire at system scope: the flags of other GPUs, and the word by which the host lets all
// begin.
__device__ void raise(int* flag, int value) {
  asm volatile("st.release.sys.global.s32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}
__device__ int look(const int* flag) {
  int value;
  asm volatile("ld.acquire.sys.global.s32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}
__device__ void wait_for(const int* flag, int value) {
  while (look(flag) < value) {
  }
}
__device__ void wait_for_host(const int* gate) {
  if (threadIdx.x == 0) wait_for(gate, 1);
  __syncthreads();
}

// Whole rows to the other ranks in turn, a warp a row.
__global__ void __launch_bounds__(kThreads)
    push_rows(Pointers staging, const char* source, int rank, int ranks, const int* gate) {
  wait_for_host(gate);
  const int warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, warps = gridDim.x * blockDim.x / 32;
  for (int round = 0; round < kRounds; ++round) {
    for (int row = warp; row < kRows; row += warps) {
      const int peer = (rank + 1 + row % (ranks - 1)) % ranks;
      const auto* from = reinterpret_cast<const int4*>(source + std::int64_t{row} * kRowBytes);
      auto* to = reinterpret_cast<int4*>(staging.at[peer] + (std::int64_t{rank} * kRows + row) * kRowBytes);
      for (int first = threadIdx.x % 32; first < kUnits; first += 32 * kInFlight) {
        int4 piece[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i)
          if (first + 32 * i < kUnits) piece[i] = from[first + 32 * i];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i)
          if (first + 32 * i < kUnits) to[first + 32 * i] = piece[i];
      }
    }
  }
}

__global__ void ping_pong(int* mine, int* peers, bool begins, const int* gate) {
  wait_for_host(gate);
  for (int turn = 1; turn <= kTurns; ++turn) {
    if (begins) raise(peers, turn);
    wait_for(mine, turn);
    if (!begins) raise(peers, turn);
  }
}

__global__ void meet(Pointers flags, int rank, int ranks, const int* gate) {
  wait_for_host(gate);
  for (int turn = 1; turn <= kTurns; ++turn) {
    if (threadIdx.x < ranks) {
      raise(reinterpret_cast<int*>(flags.at[threadIdx.x]) + rank, turn);
      wait_for(reinterpret_cast<int*>(flags.at[rank]) + threadIdx.x, turn);
    }
    __syncthreads();
  }
}

__global__ void nothing() {}

int gpus() {
  int count = 0;
  check(cudaGetDeviceCount(&count), "count the GPUs");
  return count;
}

void reach_peers(int device, int devices) {
  for (int peer = 0; peer < devices; ++peer) {
    if (peer == device) continue;
    const cudaError_t status = cudaDeviceEnablePeerAccess(peer, 0);
    if (status != cudaErrorPeerAccessAlreadyEnabled) check(status, "let GPUs reach one another");
    cudaGetLastError();  // "already" is no error here
  }
}

// Memory and streams of all ranks, driven by one thread; kernels begin together, when the host opens a gate.
class Ranks {
 public:
  Ranks(int ranks, std::int64_t bytes) : ranks_(ranks), devices_(gpus()) {
    if (ranks > kMostRanks) throw UsageError("limits of GPUs: at most 32 ranks");
    check(cudaHostAlloc(&gate_, sizeof(int), cudaHostAllocPortable | cudaHostAllocMapped), "pin memory");
    for (int rank = 0; rank < ranks; ++rank) {
      use(rank);
      reach_peers(rank % devices_, devices_);
      check(cudaMalloc(&memory_.at[rank], static_cast<std::size_t>(bytes)), "allocate device memory");
      check(cudaMemset(memory_.at[rank], 0, static_cast<std::size_t>(bytes)), "clear device memory");
      check(cudaStreamCreateWithFlags(&streams_[rank], cudaStreamNonBlocking), "create a stream");
    }
    wait();
  }
  ~Ranks() {
    for (int rank = 0; rank < ranks_; ++rank) {
      cudaSetDevice(rank % devices_);
      if (streams_[rank] != nullptr) cudaStreamDestroy(streams_[rank]);
      cudaFree(memory_.at[rank]);
    }
    cudaFreeHost(gate_);
  }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  void use(int rank) const { check(cudaSetDevice(rank % devices_), "use a GPU"); }
  const Pointers& memory() const { return memory_; }
  cudaStream_t stream(int rank) const { return streams_[rank]; }
  const int* gate() const { return gate_; }

  // Seconds from the gate's opening to the last rank's end.
  template <class Launch>
  double time(Launch launch) const {
    *static_cast<volatile int*>(gate_) = 0;
    for (int rank = 0; rank < ranks_; ++rank) {
      use(rank);
      launch(rank);
      check(cudaGetLastError(), "launch a kernel that measures");
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
  cudaStream_t streams_[kMostRanks] = {};
};

}  // namespace

std::vector<std::string> gpu_names() {
  std::vector<std::string> names;
  for (int device = 0; device < gpus(); ++device) {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, device), "ask a GPU for its name");
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
  constexpr std::int64_t kPushed = std::int64_t{kRows} * kRowBytes;
  const Ranks all(ranks, (ranks + 1) * kPushed);  // what comes from every rank, and the rank's own rows
  double best = 0;
  for (int repeat = 0; repeat < 3; ++repeat) {  // the first warms up
    const double seconds = all.time([&](int rank) {
      push_rows<<<sms, kThreads, 0, all.stream(rank)>>>(all.memory(), all.memory().at[rank] + ranks * kPushed,
                                                        rank, ranks, all.gate());
    });
    best = std::max(best, static_cast<double>(kPushed) * kRounds / seconds);
  }
  return best;
}

double measure_gpu_flag() {
  const Ranks two(2, 4096);
  const auto flag = [&](int rank) { return reinterpret_cast<int*>(two.memory().at[rank]); };
  return two.time([&](int rank) {
    ping_pong<<<1, 1, 0, two.stream(rank)>>>(flag(rank), flag(1 - rank), rank == 0, two.gate());
  }) / kTurns /
         2;
}

double measure_gpu_barrier(int ranks) {
  const Ranks all(ranks, 4096);
  return all.time([&](int rank) {
    meet<<<1, 32, 0, all.stream(rank)>>>(all.memory(), rank, ranks, all.gate());
  }) / kTurns;
}

double measure_launch(int blocks) {
  constexpr int kNodes = 100, kReplays = 20;
  const Ranks one(1, 4096);
  one.use(0);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  check(cudaStreamBeginCapture(one.stream(0), cudaStreamCaptureModeThreadLocal), "capture a graph");
  for (int node = 0; node < kNodes; ++node) nothing<<<blocks, 32, 0, one.stream(0)>>>();
  check(cudaStreamEndCapture(one.stream(0), &graph), "capture a graph");
  const cudaError_t made = cudaGraphInstantiate(&executable, graph, 0);
  cudaGraphDestroy(graph);
  check(made, "make a graph");
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
