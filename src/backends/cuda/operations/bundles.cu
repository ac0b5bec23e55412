#define FERRY_WIDE_KERNELS  // for groups of any size
#include "backends/cuda/operations/bundles.hpp"

#include "backends/cuda/device/block_sums.cuh"
#include "backends/cuda/runtime/launch.hpp"

namespace ferry::cuda {
namespace {

constexpr int kNumberThreads = 1024, kCopyThreads = 256, kCopyWarps = kCopyThreads / 32, kBlocksOfRank = 64;

// [thread] Number of the message to a rank that carries `token`; -1 if there is none. `tokens` ascend.
__device__ std::int32_t message_of(const std::int32_t* tokens, std::int32_t count, std::int32_t token) {
  std::int32_t low = 0, end = count;
  while (low < end) {
    const std::int32_t middle = low + (end - low) / 2;
    if (tokens[middle] < token) {
      low = middle + 1;
    } else {
      end = middle;
    }
  }
  return low < count && tokens[low] == token ? low : -1;
}

// A single block. A token's payload gets the number of its message to the lowest rank of the node.
__global__ void __launch_bounds__(kNumberThreads)
    number_payloads_kernel(const __grid_constant__ NumberPayloadsArguments call) {
  __shared__ BlockSums<kNumberThreads> sums;
  const auto of_rank = [&](const std::int32_t* array, int i) {
    return array + std::int64_t{call.to.rank[i]} * call.max_tokens;
  };
  std::int32_t before = 0;
  for (int to = 0; to < call.to.ranks; ++to) {
    const std::int32_t count = call.to.count[to];
    auto* const mine = const_cast<std::int32_t*>(of_rank(call.payload_of, to));
    for (std::int32_t first = 0; first < count; first += kNumberThreads) {
      const std::int32_t i = first + static_cast<int>(threadIdx.x);
      std::int32_t known = -1;  // number of the payload that a message to a lower rank has
      for (int lower = 0; i < count && known < 0 && lower < to; ++lower) {
        const std::int32_t found = call.to.count[lower] == 0
                                       ? -1
                                       : message_of(of_rank(call.sent_tokens, lower), call.to.count[lower],
                                                    of_rank(call.sent_tokens, to)[i]);
        if (found < 0) continue;
        const std::int32_t number = of_rank(call.payload_of, lower)[found];
        known = number < 0 ? -1 - number : number;
      }
      std::int32_t all = 0;
      const std::int32_t number = before + sums.before(i < count && known < 0 ? 1 : 0, &all);
      if (i < count) mine[i] = known < 0 && number < call.max_tokens ? number : -1 - max(known, 0);
      before += all;
    }
    __syncthreads();  // later ranks read these numbers
  }
  if (threadIdx.x == 0) *call.payloads = min(before, call.max_tokens);
}

// [warp] Copies whole 16-byte units.
__device__ void copy_units(std::byte* to, const std::byte* from, std::int32_t bytes) {
  for (std::int32_t at = 16 * static_cast<int>(threadIdx.x % 32); at < bytes; at += 512)
    *reinterpret_cast<uint4*>(to + at) = *reinterpret_cast<const uint4*>(from + at);
}

// The messages of one rank that fall to this warp: every kStep-th from `first` on.
struct WarpShare {
  static constexpr int kStep = kBlocksOfRank * kCopyWarps;
  int rank, first;

  __device__ WarpShare()
      : rank(static_cast<int>(blockIdx.x) / kBlocksOfRank),
        first(static_cast<int>(blockIdx.x) % kBlocksOfRank * kCopyWarps +
              static_cast<int>(threadIdx.x) / 32) {}
};

__global__ void __launch_bounds__(kCopyThreads)
    write_bundle_kernel(const __grid_constant__ WriteBundleArguments call) {
  const WarpShare share;
  const NodeMessages& to = call.to;
  std::int64_t entries = 0;  // entries of the ranks before this one
  for (int rank = 0; rank < share.rank; ++rank) entries += to.count[rank];
  for (int i = share.first; i < to.count[share.rank]; i += WarpShare::kStep) {
    const std::byte* message = to.messages[share.rank] + i * std::int64_t{call.sizes.message()};
    const std::int32_t noted = call.payload_of[std::int64_t{to.rank[share.rank]} * call.max_tokens + i],
                       number = noted < 0 ? -1 - noted : noted;
    std::byte* entry = call.bundle + (entries + i) * call.sizes.entry();
    copy_units(entry, message + call.sizes.payload, call.sizes.metadata);
    if (threadIdx.x % 32 == 0) *reinterpret_cast<std::int64_t*>(entry + call.sizes.metadata) = number;
    if (noted >= 0)
      copy_units(call.payloads + number * std::int64_t{call.sizes.payload}, message, call.sizes.payload);
  }
}

__global__ void __launch_bounds__(kCopyThreads)
    open_bundle_kernel(const __grid_constant__ OpenBundleArguments call) {
  const WarpShare share;
  if (call.messages[share.rank] == nullptr) return;
  for (int i = share.first; i < call.count[share.rank]; i += WarpShare::kStep) {
    const std::byte* entry = call.entries[share.rank] + i * std::int64_t{call.sizes.entry()};
    std::byte* message = call.messages[share.rank] + i * std::int64_t{call.sizes.message()};
    const std::int64_t number = *reinterpret_cast<const std::int64_t*>(entry + call.sizes.metadata);
    copy_units(message + call.sizes.payload, entry, call.sizes.metadata);
    if (number >= 0 && number < call.payload_count)
      copy_units(message, call.payloads + number * call.sizes.payload, call.sizes.payload);
  }
}

const Kernel<NumberPayloadsArguments> kNumberPayloadsKernel{&number_payloads_kernel, kNumberThreads,
                                                            "number the payloads of a bundle"};
const Kernel<WriteBundleArguments> kWriteBundleKernel{&write_bundle_kernel, kCopyThreads, "write a bundle"};
const Kernel<OpenBundleArguments> kOpenBundleKernel{&open_bundle_kernel, kCopyThreads, "open a bundle"};

}  // namespace

void launch_number_payloads(const NumberPayloadsArguments& arguments, cudaStream_t stream) {
  kNumberPayloadsKernel(arguments, {}, {stream});
}

void launch_write_bundle(const WriteBundleArguments& arguments, cudaStream_t stream) {
  kWriteBundleKernel(arguments, {.blocks = kBlocksOfRank * arguments.to.ranks}, {stream});
}

void launch_open_bundle(const OpenBundleArguments& arguments, cudaStream_t stream) {
  kOpenBundleKernel(arguments, {.blocks = kBlocksOfRank * arguments.ranks}, {stream});
}

}  // namespace ferry::cuda
