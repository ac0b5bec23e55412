// Device memory and pinned memory of one rank, and the errors on a machine without a driver.
#include "backends/cuda/memory/device_memory.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "backends/cuda/memory/symmetric.hpp"
#include "backends/cuda/operations/memory_kernels.hpp"
#include "backends/cuda/runtime/driver.hpp"
#include "backends/cuda/runtime/error.hpp"
#include "cuda/memory/devices.hpp"
#include "cuda/memory/kernels.hpp"
#include "runtime/channel_support.hpp"

namespace ferry::test {
namespace {

using cuda::DeviceMemory;
using cuda::PinnedMemory;

TEST(CudaErrors, NameTheActionAndTheRemedy) {
  cuda::check(cudaSuccess, "do it");
  const auto full = expect_thrown<SystemError>([] { cuda::check(cudaErrorMemoryAllocation, "get 5 bytes"); });
  EXPECT_EQ(full.error_number, ENOMEM);
  require_text(full, "cannot get 5 bytes: cudaErrorMemoryAllocation (");
  const auto wrong = expect_thrown<SystemError>([] { cuda::check(cudaErrorInvalidValue, "do it"); });
  EXPECT_EQ(wrong.error_number, EIO);
  const auto none = expect_thrown<UnsupportedError>([] { cuda::check(cudaErrorNoDevice, "do it"); });
  require_text(none, "CUDA_VISIBLE_DEVICES");
}

TEST(CudaErrors, MissingDriverIsUnsupported) {
  int version = 0;
  cudaDriverGetVersion(&version);
  if (version != 0) GTEST_SKIP() << "this machine has a driver";
  for (int i = 0; i < 2; ++i) {
    const auto error = expect_thrown<UnsupportedError>([] { cuda::driver(); });
    require_text(error, "this machine has no CUDA driver: install");
  }
  EXPECT_THROW(DeviceMemory(16), UnsupportedError);
  EXPECT_THROW(PinnedMemory(16), UnsupportedError);
  Group::threads(3).run([](const Rank& rank) {
    const auto error = expect_thrown<UnsupportedError>([&] { cuda::DeviceSymmetricMemory(rank, 64); });
    require_text(error, "rank 0: ");
    require_text(error, "this machine has no CUDA driver");
    rank.barrier();
  });
}

TEST(DeviceMemory, StartsZeroedOnItsDevice) {
  FERRY_SKIP_WITHOUT_DEVICES(1);
  constexpr int kBytes = 1000003;
  for (int device = 0; device < device_count(); ++device) {
    cuda::check(cudaSetDevice(device), "set the device");
    for (int round = 0; round < 3; ++round) {
      DeviceMemory memory(kBytes);
      EXPECT_EQ(memory.device(), device);
      EXPECT_EQ(memory.bytes(), kBytes);
      std::vector<std::byte> read(kBytes, std::byte{0xA5});
      copy_bytes(read.data(), memory.data(), kBytes);
      for (const std::byte byte : read) ASSERT_EQ(byte, std::byte{0});
      std::memset(read.data(), 0x5A, kBytes);
      copy_bytes(memory.data(), read.data(), kBytes);  // the next round must not see this
      cuda::check(cudaSetDevice(0), "set the device");
      DeviceMemory moved = std::move(memory);
      EXPECT_EQ(moved.device(), device);
      EXPECT_EQ(memory.data(), nullptr);
      cuda::check(cudaSetDevice(device), "set the device");
    }
  }
  EXPECT_EQ(DeviceMemory(0).data(), nullptr);
  EXPECT_EQ(expect_thrown<SystemError>([] { DeviceMemory(std::int64_t{1} << 50); }).error_number, ENOMEM);
  cuda::check(cudaGetLastError(), "continue after a refusal");
}

TEST(DeviceMemory, ClearZeroesTwoRangesAndNothingElse) {
  FERRY_SKIP_WITHOUT_DEVICES(1);
  using Lengths = std::pair<std::int64_t, std::int64_t>;
  constexpr std::int64_t kBytes = 1 << 24, kMuch = 1 << 23;
  cuda::check(cudaSetDevice(0), "set the device");
  const DeviceMemory memory(kBytes);
  const TestStream stream;
  for (const auto& [first, second] :
       std::vector<Lengths>{{0, 0}, {1, 0}, {0, 15}, {16, 31}, {4099, 4097}, {kMuch + 7, 5}}) {
    const std::int64_t from = kBytes - 16 - second / 16 * 16;
    std::vector<std::byte> expected(kBytes, std::byte{0x5A}), read(kBytes);
    copy_bytes(memory.data(), expected.data(), kBytes);
    std::fill_n(expected.begin() + 16, first, std::byte{0});
    std::fill_n(expected.begin() + from, second, std::byte{0});
    cuda::clear({memory.data() + 16, first}, {memory.data() + from, second}, stream.get());
    stream.synchronize();
    copy_bytes(read.data(), memory.data(), kBytes);
    EXPECT_TRUE(read == expected) << first << " and " << second;
  }
}

TEST(PinnedMemory, StartsZeroedAndEveryDeviceWritesIt) {
  FERRY_SKIP_WITHOUT_DEVICES(1);
  constexpr int kWords = 4096;
  const PinnedMemory memory(4 * kWords);
  auto* words = reinterpret_cast<std::uint32_t*>(memory.data());
  for (int i = 0; i < kWords; ++i) ASSERT_EQ(words[i], 0u);
  for (int device = 0; device < device_count(); ++device) {
    cuda::check(cudaSetDevice(device), "set the device");
    const TestStream stream;
    start_fill(stream.get(), words, kWords, seed() + device);
    stream.synchronize();
    for (int i = 0; i < kWords; ++i) ASSERT_EQ(words[i], pattern(seed() + device, i)) << i;
  }
  EXPECT_EQ(PinnedMemory(0).data(), nullptr);
  EXPECT_THROW(PinnedMemory(std::int64_t{1} << 50), SystemError);
  cuda::check(cudaGetLastError(), "continue after a refusal");
}

}  // namespace
}  // namespace ferry::test
