// The device of a CUDA exchange, as programs use it.
#include "exchange/device_work.hpp"

#include <cuda_runtime_api.h>

#include <deque>

#include "backends/cuda/host/cuda_backend.hpp"
#include "backends/cuda/memory/device_memory.hpp"
#include "backends/cuda/memory/pointer_check.hpp"
#include "backends/cuda/operations/memory_kernels.hpp"
#include "backends/cuda/runtime/driver.hpp"
#include "backends/cuda/runtime/launch.hpp"
#include "backends/cuda/runtime/stream.hpp"

namespace ferry::cuda {

namespace {

class CudaDeviceWork final : public DeviceWork {
 public:
  explicit CudaDeviceWork(int device) : device_(device) {}
  ~CudaDeviceWork() override {
    const ScopedDevice device(device_);
    for (const CudaStream& stream : streams_) cudaStreamSynchronize(stream.get());
    streams_.clear();
    events_.clear();
    memory_.clear();
    scratch_ = DeviceMemory();
    broken_ = DeviceMemory();
  }

  Stream make_stream() override {
    const ScopedDevice device(device_);
    const CudaStream& stream = streams_.emplace_back();
    // The first work of a stream must not be a call that other ranks wait for (copy_stream.hpp).
    if (scratch_.data() == nullptr) scratch_ = DeviceMemory(sizeof(std::int32_t));
    set_number(reinterpret_cast<std::int32_t*>(scratch_.data()), 0, stream);
    stream.synchronize();
    return stream;
  }
  int make_event() override {
    const ScopedDevice device(device_);
    events_.emplace_back();
    return static_cast<int>(events_.size()) - 1;
  }
  std::byte* allocate(std::int64_t bytes) override {
    const ScopedDevice device(device_);
    return memory_.emplace_back(bytes).data();
  }

  void record(int event, Stream stream) override {
    const ScopedDevice device(device_);  // the null stream is one of the current device
    this->event(event).record(handle_of(stream));
  }
  void wait(int event, Stream stream) override {
    const ScopedDevice device(device_);
    this->event(event).hold_back(handle_of(stream));
  }
  void copy_rows(void* to, const void* from, std::int64_t from_stride, std::int64_t row_bytes,
                 std::int64_t rows, Stream stream) override {
    const ScopedDevice device(device_);
    cuda::copy_rows({to, row_bytes, from, from_stride, row_bytes, rows}, stream);
  }

  void set_number(std::int32_t* to, std::int32_t number, Stream stream) override {
    const ScopedDevice device(device_);
    check(driver().memset_d32_async(reinterpret_cast<CUdeviceptr>(to), static_cast<unsigned>(number), 1,
                                    handle_of(stream)),
          "set a number in device memory");
  }
  void add_rows(const ListedSums& sums, Stream stream) override {
    if (sums.count == 0) return;
    const ScopedDevice device(device_);
    kListedSumsKernel(sums, {}, stream);
  }

  void copy(void* to, const void* from, std::int64_t bytes) override {
    const ScopedDevice device(device_);
    copy_blocking(to, from, bytes);
  }
  void require_usable(const char* operation, const char* name, const void* address) override {
    CallPointers pointers;
    pointers.add(name, address, 16);
    PointerCheck("", device_, [this](const void* at) {
      return find_memory(at, device_);
    }).require_usable(operation, pointers);
  }

  bool is_captured(Stream stream) const override {
    const ScopedDevice device(device_);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(handle_of(stream), &status), "query the capture state of a stream");
    return status != cudaStreamCaptureStatusNone;
  }

  void prepare_guards(int lanes) override {
    const ScopedDevice device(device_);
    broken_ = DeviceMemory(lanes * static_cast<std::int64_t>(sizeof(unsigned long long)));
  }
  void fill_guards(const GuardedRows& rows, int value, Stream stream) override {
    if (rows.guard_bytes == 0 || rows.rows == 0) return;
    const ScopedDevice device(device_);
    kFillGuardsKernel({rows, value, 0, nullptr}, {}, stream);
  }
  void check_guards(const GuardedRows& rows, int value, int lane, int part, Stream stream) override {
    if (rows.guard_bytes == 0 || rows.rows == 0) return;
    const ScopedDevice device(device_);
    kCheckGuardsKernel({rows, value, part, broken_of(lane)}, {}, stream);
  }
  std::optional<BrokenGuard> take_broken_guard(int lane) override {
    const ScopedDevice device(device_);
    unsigned long long number = 0;
    copy_blocking(&number, broken_of(lane), sizeof number);
    if (number == 0) return std::nullopt;
    const unsigned long long none = 0;
    copy_blocking(broken_of(lane), &none, sizeof none);
    return broken_guard(number);
  }

 private:
  unsigned long long* broken_of(int lane) const {
    return reinterpret_cast<unsigned long long*>(broken_.data()) + lane;
  }
  const CudaEvent& event(int number) const { return events_[static_cast<std::size_t>(number)]; }

  int device_;
  // deque: neither streams nor events can be moved
  std::deque<CudaStream> streams_;
  std::deque<CudaEvent> events_;
  std::deque<DeviceMemory> memory_;
  DeviceMemory scratch_;  // for the first work of streams
  DeviceMemory broken_;   // a number_of() BrokenGuard for each lane, or 0
};

}  // namespace

std::unique_ptr<DeviceWork> CudaBackend::make_device_work() const {
  return std::make_unique<CudaDeviceWork>(exchange_.device);
}

}  // namespace ferry::cuda
