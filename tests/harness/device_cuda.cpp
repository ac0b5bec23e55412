#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <thread>

#include "harness/device.hpp"
#include "harness/driver_environment.hpp"
#include "harness/pinned_heap.hpp"
#include "harness/require_success.hpp"
#include "harness/test_stream.hpp"

namespace ferry::contract::device {
namespace {

std::atomic<int> active_scopes{0};
std::atomic<bool> driver_was_started{false};

bool has_mirrors() {
  const char* memory = std::getenv("FERRY_TEST_MEMORY");
  return memory != nullptr && std::string(memory) == "device";
}

// Never destroyed: the driver shuts down before static objects are destroyed.
PinnedHeap& pinned_heap() {
  static auto* const instance = new PinnedHeap(has_mirrors());
  return *instance;
}

int device_of(int local_rank) {
  static const int devices = [] {
    int count = 0;
    require_success(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    return count;
  }();
  return local_rank % devices;
}

int current_device() {
  int device = 0;
  require_success(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

std::map<int, TestStream>& streams_of_thread() {
  static thread_local std::map<int, TestStream> streams;
  return streams;
}

cudaStream_t stream_of_thread() {
  return streams_of_thread()[current_device()].get();
}

void sleep_in_stream(void* microseconds) {
  std::this_thread::sleep_for(std::chrono::microseconds(reinterpret_cast<std::intptr_t>(microseconds)));
}

}  // namespace

bool is_built() {
  return true;
}

int count() {
  if (const char* visible = std::getenv("CUDA_VISIBLE_DEVICES"))
    return *visible == 0 ? 0 : 1 + static_cast<int>(std::count(visible, visible + std::strlen(visible), ','));
  int gpus = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/dev")) {
    const std::string name = entry.path().filename();
    gpus += name.size() > 6 && name.starts_with("nvidia") && name[6] >= '0' && name[6] <= '9';
  }
  return gpus;
}

std::string skip_reason() {
  if (!std::filesystem::exists("/dev/nvidiactl")) return "no GPU driver here: there is no /dev/nvidiactl";
  return count() > 0 ? "" : "no GPU here: there is no /dev/nvidia0";
}

bool driver_started() {
  return driver_was_started;
}

RankScope::RankScope(int local_rank) {
  driver_was_started = true;
  require_success(cudaSetDevice(device_of(local_rank)), "cudaSetDevice");
  ++active_scopes;
}

RankScope::~RankScope() {
  --active_scopes;
}

bool rank_is_active() {
  return active_scopes > 0;
}

Stream stream(int local_rank) {
  require_success(cudaSetDevice(device_of(local_rank)), "cudaSetDevice");
  return {stream_of_thread()};
}

void make_stream(int local_rank) {
  stream(local_rank);
  void* memory = nullptr;
  const std::int64_t value = 0;
  require_success(cudaMalloc(&memory, sizeof value), "cudaMalloc");
  copy(memory, &value, sizeof value);
  require_success(cudaFree(memory), "cudaFree");
}

Stream new_stream(int local_rank) {
  require_success(cudaSetDevice(device_of(local_rank)), "cudaSetDevice");
  streams_of_thread().erase(current_device());
  make_stream(local_rank);
  return {stream_of_thread()};
}

void wait(Stream stream) {
  require_success(cudaStreamSynchronize(static_cast<cudaStream_t>(stream.handle)), "cudaStreamSynchronize");
}

void delay(Stream stream, std::int64_t microseconds) {
  require_success(cudaLaunchHostFunc(static_cast<cudaStream_t>(stream.handle), sleep_in_stream,
                                     reinterpret_cast<void*>(static_cast<std::intptr_t>(microseconds))),
                  "cudaLaunchHostFunc");
}

std::byte* allocate(std::int64_t bytes) {
  return pinned_heap().allocate(bytes);
}

void release(std::byte* block) {
  pinned_heap().release(block);
}

std::string memory_kind() {
  return has_mirrors() ? "device" : "pinned";
}

Block block_of(const void* pointer) {
  return pinned_heap().block_of(pointer, current_device());
}

void* host_of(const void* pointer) {
  return pinned_heap().host_of(pointer);
}

bool in_device_memory(const void* pointer) {
  cudaPointerAttributes attributes{};
  require_success(cudaPointerGetAttributes(&attributes, pointer), "cudaPointerGetAttributes");
  return attributes.type == cudaMemoryTypeDevice;
}

void copy(void* to, const void* from, std::int64_t bytes) {
  cudaStream_t stream = stream_of_thread();
  require_success(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault, stream),
                  "cudaMemcpyAsync");
  require_success(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

std::int64_t memory_in_use() {
  std::size_t free = 0, total = 0;
  require_success(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return static_cast<std::int64_t>(total - free);
}

}  // namespace ferry::contract::device
