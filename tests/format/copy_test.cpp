// Copies and zeroes memory of every size and alignment, and checks that guard bytes around it are intact.
#include <gtest/gtest.h>

#include <algorithm>

#include "backends/cpu/kernels/kernels.hpp"
#include "format/support.hpp"

namespace ferry::test {
namespace {

using cpu::Store;

Memory random_memory(Random& random, std::int64_t bytes, std::int64_t offset) {
  Memory memory(bytes, offset);
  for (std::int64_t i = 0; i < bytes; ++i) memory.data()[i] = static_cast<std::byte>(random());
  return memory;
}

class Copies : public testing::TestWithParam<const cpu::Kernels*> {
 protected:
  const cpu::Kernels& kernels_ = *GetParam();
  Random random_{seed()};
  testing::ScopedTrace trace_{__FILE__, __LINE__, "FERRY_SEED=" + std::to_string(seed())};

  void expect_copy(std::int64_t bytes, std::int64_t from, std::int64_t to, Store store) {
    const Memory in = random_memory(random_, bytes, from);
    Memory out(bytes, to);
    kernels_.copy(out.data(), in.data(), bytes, store);
    cpu::stream_fence();
    ASSERT_TRUE(out.equals(in)) << bytes << " bytes from " << from << " to " << to;
    ASSERT_TRUE(out.guards_intact()) << bytes << " bytes from " << from << " to " << to;
  }
};

INSTANTIATE_TEST_SUITE_P(Isa, Copies, testing::ValuesIn(cpu::available_kernels()),
                         [](const auto& instance) { return instance.param->name; });

TEST_P(Copies, EveryMultipleOf16) {
  for (std::int64_t bytes = 0; bytes <= 4096; bytes += 16) {
    for (const std::int64_t to : {0, 16, 32, 48}) {
      for (const Store store : {Store::cached, Store::streaming}) {
        expect_copy(bytes, 16 * below(random_, 4), to, store);
      }
    }
  }
}

TEST_P(Copies, AnySizeAndAlignment) {
  for (std::int64_t bytes = 0; bytes <= 300; ++bytes) {
    for (std::int64_t to = 0; to < 64; to += 1 + below(random_, 9)) {
      expect_copy(bytes, below(random_, 64), to, Store::streaming);
    }
    expect_copy(bytes, below(random_, 64), below(random_, 64), Store::cached);
  }
}

TEST_P(Copies, LargeRows) {
  for (const std::int64_t bytes : {14336, 16384, 16400, 28672, 65536, 1000000}) {
    for (const Store store : {Store::cached, Store::streaming}) expect_copy(bytes, 16, 32, store);
  }
}

TEST_P(Copies, ToManyDestinations) {
  for (const std::int64_t bytes : {0, 16, 48, 64, 208, 4096, 14336, 16384, 16400, 40000}) {
    for (int count = 0; count <= 9; ++count) {
      for (const Store store : {Store::cached, Store::streaming}) {
        const Memory in = random_memory(random_, bytes, 16 * below(random_, 4));
        std::vector<Memory> outs;
        std::vector<void*> pointers;
        for (int i = 0; i < count; ++i) outs.emplace_back(bytes, 16 * below(random_, 4));
        for (Memory& out : outs) pointers.push_back(out.data());
        kernels_.copy_to_many(pointers.data(), count, in.data(), bytes, store);
        cpu::stream_fence();
        for (const Memory& out : outs)
          ASSERT_TRUE(out.equals(in) && out.guards_intact()) << bytes << " x " << count;
      }
    }
  }
}

TEST_P(Copies, Zero) {
  for (std::int64_t bytes = 0; bytes <= 4096; bytes += 16 + below(random_, 3)) {
    Memory out = random_memory(random_, bytes, below(random_, 64));
    kernels_.zero(out.data(), bytes);
    ASSERT_TRUE(std::all_of(out.data(), out.data() + bytes, [](std::byte b) { return b == std::byte{0}; }))
        << bytes;
    ASSERT_TRUE(out.guards_intact()) << bytes;
  }
}

}  // namespace
}  // namespace ferry::test
