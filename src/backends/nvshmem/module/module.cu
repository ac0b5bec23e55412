// The shared object that links NVSHMEM.
#include "backends/nvshmem/module/module.hpp"

#include <cstring>

#include "backends/cuda/transport/message_check.cuh"
#include "backends/nvshmem/module/hop_kernel.cuh"

namespace ferry::nvshmem {
namespace wide {  // wide_hops.cu
int prepare_hop_kernel();
int launch_hop_kernel(const cuda::HopArguments& arguments, const Peers& peers, const HopLaunch& launch);
}  // namespace wide

namespace {

constexpr int kCheckThreads = 256;

__global__ void __launch_bounds__(kCheckThreads)
    check_kernel(const cuda::MessageCheck check, const Puts puts) {
  cuda::check_messages(check, puts, static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32));
}

void version(int* major, int* minor, int* patch) {
  nvshmemx_vendor_get_version_info(major, minor, patch);
}

bool is_running() {
  return nvshmemx_init_status() >= NVSHMEM_STATUS_IS_INITIALIZED;
}

int make_id(void* id) {
  static_assert(sizeof(nvshmemx_uniqueid_t) == kIdBytes);
  nvshmemx_uniqueid_t made = NVSHMEMX_UNIQUEID_INITIALIZER;
  const int status = nvshmemx_get_uniqueid(&made);
  std::memcpy(id, &made, sizeof made);
  return status;
}

// Calls what nvshmemx_init_attr() calls, which would end the process on an error.
int initialise(unsigned flags, nvshmemx_init_attr_t* attributes) {
  int provided = 0;
  const nvshmemi_version_t compiled{NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION,
                                    NVSHMEM_VENDOR_PATCH_VERSION};
  return nvshmemi_init_thread(NVSHMEM_THREAD_SERIALIZED, &provided, flags, attributes, compiled);
}

int start(int rank, int ranks, const void* id) {
  // Needed also where NVSHMEM is running: this module has device state of its own to initialise.
  if (id == nullptr) return initialise(0, nullptr);
  nvshmemx_uniqueid_t shared;
  std::memcpy(&shared, id, sizeof shared);
  nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
  if (const int status = nvshmemx_set_attr_uniqueid_args(rank, ranks, &shared, &attributes); status != 0)
    return status;
  return initialise(NVSHMEMX_INIT_WITH_UNIQUEID, &attributes);
}

int my_pe() {
  return nvshmem_my_pe();
}
int pe_count() {
  return nvshmem_n_pes();
}

void* allocate(std::size_t bytes) {
  return nvshmem_calloc(bytes, 1);
}

void* mapped(const void* memory, int pe) {
  return nvshmem_ptr(memory, pe);
}

int register_source(void* memory, std::size_t bytes) {
  return nvshmemx_buffer_register(memory, bytes);
}
int unregister_source(void* memory) {
  return nvshmemx_buffer_unregister(memory);
}

int check_messages(const cuda::MessageCheck& check, const Peers& peers, int blocks, void* stream) {
  check_kernel<<<static_cast<unsigned>(blocks), kCheckThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      check, Puts{{}, peers});
  return static_cast<int>(cudaGetLastError());
}

int prepare_hops(bool wide) {
  return wide ? wide::prepare_hop_kernel() : prepare_hop_kernel();
}

int launch_hops(const cuda::HopArguments& arguments, const Peers& peers, const HopLaunch& launch) {
  return launch.wide ? wide::launch_hop_kernel(arguments, peers, launch)
                     : launch_hop_kernel(arguments, peers, launch);
}

}  // namespace
}  // namespace ferry::nvshmem

extern "C" __attribute__((visibility("default"))) bool ferry_nvshmem_open(
    const ferry::nvshmem::ModuleBuild& build, ferry::nvshmem::Module* module) {
  using namespace ferry::nvshmem;
  if (!(build == ModuleBuild(FERRY_VERSION))) return false;
  *module = {version, is_running,      make_id,           start,          my_pe,        pe_count,   allocate,
             mapped,  register_source, unregister_source, check_messages, prepare_hops, launch_hops};
  return true;
}
