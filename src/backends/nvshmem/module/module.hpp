// Interface of the shared object that links NVSHMEM, which is opened at run time: Ferry itself links none.
// Both sides are compiled from the same sources.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "backends/cuda/transport/message_check.hpp"
#include "backends/cuda/two_hops/hop_call.hpp"
#include "base/integers.hpp"

namespace ferry::nvshmem {

// Compared when the module is opened.
struct ModuleBuild {
  char version[16] = {};
  std::uint64_t check_bytes = sizeof(cuda::MessageCheck);
  std::uint64_t hop_bytes = sizeof(cuda::HopArguments);

  // `number`: of Ferry's version.
  explicit ModuleBuild(std::string_view number) { number.copy(version, sizeof version - 1); }
  friend bool operator==(const ModuleBuild&, const ModuleBuild&) = default;
};

inline constexpr std::size_t kIdBytes = 128;

// How the module's kernels reach the ranks.
struct Peers {
  RankBits<kMaxDeviceRanks> remote;  // reached by puts
  const std::int32_t* pes;           // [R] in device memory: the ranks' PE numbers
};

struct HopLaunch {
  int blocks;
  bool cooperative, wide;  // wide: for a group that takes wide kernels (lane_view.hpp)
  void* stream;            // cudaStream_t
};

// Functions return 0, or a code of NVSHMEM or CUDA, which only means that they have failed.
struct Module {
  void (*version)(int* major, int* minor, int* patch);  // of the library that is loaded
  bool (*is_running)();                                 // NVSHMEM has been started in this process
  int (*make_id)(void* id);                             // [kIdBytes]
  // Collective, and may block: starts NVSHMEM, whose PE numbers are then those of the ranks. With a null
  // `id` takes part in what the process has started.
  int (*start)(int rank, int ranks, const void* id);
  int (*my_pe)();
  int (*pe_count)();
  // Collective, and may block. Zeroed; null if there is no memory.
  void* (*allocate)(std::size_t bytes);
  // Where this process reaches that memory of a PE by loads and stores; null: it does not.
  void* (*mapped)(const void* memory, int pe);
  // Local: makes memory of this process a source of puts, and ends that.
  int (*register_source)(void* memory, std::size_t bytes);
  int (*unregister_source)(void* memory);
  // Enqueues the check on a stream (cudaStream_t), in `blocks` blocks.
  int (*check_messages)(const cuda::MessageCheck& check, const Peers& peers, int blocks, void* stream);
  // Loads the launch of a call in two hops (two_hops/) on the current device, and enqueues it.
  int (*prepare_hops)(bool wide);
  int (*launch_hops)(const cuda::HopArguments& arguments, const Peers& peers, const HopLaunch& launch);
};

inline constexpr const char* kModuleName = "libferry_nvshmem.so";
inline constexpr const char* kOpenName = "ferry_nvshmem_open";
// Fills in the functions. False: the module was built from other sources.
using OpenFunction = bool (*)(const ModuleBuild& build, Module* module);

}  // namespace ferry::nvshmem
