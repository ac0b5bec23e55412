// Rows that are converted, copied and zeroed.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "backends/cpu/kernels/kernels.hpp"
#include "format/oracle.hpp"
#include "format/support.hpp"

namespace ferry::test {
namespace {

// ---- Converts, weights, sums and multiplies rows, and compares every value with simple loops over the
// oracle's numbers.

using cpu::Store;

constexpr std::int64_t kColumns[] = {0,   1,   7,   8,   15,  16,  17,  31,  33,  64,
                                     100, 129, 255, 256, 257, 511, 512, 513, 1000};

class Rows : public testing::TestWithParam<const cpu::Kernels*> {
 protected:
  const cpu::Kernels& kernels_ = *GetParam();
  Random random_{seed()};
  testing::ScopedTrace trace_{__FILE__, __LINE__, "FERRY_SEED=" + std::to_string(seed())};

  Memory random_row(DType type, std::int64_t columns) {
    Memory row(columns * bytes_of(type), below(random_, 64));
    fill_random(random_, type, row);
    return row;
  }
  Memory empty_row(DType type, std::int64_t columns) {
    return Memory(columns * bytes_of(type), random_() % 2 == 0 ? 16 * below(random_, 4) : below(random_, 64));
  }
  Store any_store() { return random_() % 2 == 0 ? Store::cached : Store::streaming; }
  float random_weight() { return decode(DType::fp32, random_bits(random_, DType::fp32)); }
};

INSTANTIATE_TEST_SUITE_P(Isa, Rows, testing::ValuesIn(cpu::available_kernels()),
                         [](const auto& instance) { return instance.param->name; });

// A conversion to the same type copies the bits. Any other rounds, and makes NaN canonical.
std::uint32_t converted(DType to, DType from, std::uint32_t bits) {
  return to == from ? bits : encode(to, decode(from, bits));
}

TEST_P(Rows, ConvertEvery16BitValue) {
  for (const DType from : {DType::bf16, DType::fp16}) {
    Memory in(65536 * 2);
    for (std::uint32_t code = 0; code < 65536; ++code) in.set_bits(from, code, code);
    for (const DType to : kTypes) {
      Memory out(65536 * bytes_of(to));
      kernels_.convert_row(out.data(), to, in.data(), from, 65536, Store::cached);
      ASSERT_TRUE(out.guards_intact());
      for (std::uint32_t code = 0; code < 65536; ++code) {
        ASSERT_EQ(out.bits(to, code), converted(to, from, code))
            << to_string(from) << " " << std::hex << code << " to " << to_string(to);
      }
    }
  }
}

TEST_P(Rows, ConvertAnyLength) {
  for (const DType from : kTypes) {
    for (const DType to : kTypes) {
      for (const std::int64_t columns : kColumns) {
        const Memory in = random_row(from, columns);
        Memory out = empty_row(to, columns);
        kernels_.convert_row(out.data(), to, in.data(), from, columns, any_store());
        cpu::stream_fence();
        ASSERT_TRUE(out.guards_intact()) << columns;
        for (std::int64_t c = 0; c < columns; ++c) {
          ASSERT_EQ(out.bits(to, c), converted(to, from, in.bits(from, c)))
              << columns << " columns, column " << c;
        }
      }
    }
  }
}

TEST_P(Rows, ApplyWeight) {
  for (const DType type : kTypes) {
    for (const std::int64_t columns : kColumns) {
      const Memory in = random_row(type, columns);
      const float weight = random_weight();
      Memory out = empty_row(type, columns);
      kernels_.apply_weight(out.data(), in.data(), type, weight, columns, any_store());
      cpu::stream_fence();
      ASSERT_TRUE(out.guards_intact()) << columns;
      for (std::int64_t c = 0; c < columns; ++c) {
        const float product = weight * decode(type, in.bits(type, c));
        ASSERT_EQ(out.bits(type, c), encode(type, product)) << columns << " columns, column " << c;
      }
    }
  }
}

std::uint32_t expected_sum(const cpu::RowSum& sum, const std::vector<Memory>& rows, std::int64_t column,
                           const Memory* residual) {
  float a = 0.0f;
  for (int r = 0; r < sum.count; ++r) {
    std::uint32_t bits = rows[r].bits(sum.row_type, column);
    if (sum.row_type != sum.combine_type) bits = encode(sum.combine_type, decode(sum.row_type, bits));
    const float v = decode(sum.combine_type, bits);
    a = sum.weights != nullptr ? std::fma(sum.weights[r], v, a) : a + v;
  }
  const std::uint32_t y = encode(sum.out_type, a);
  if (!sum.epilogue) return y;
  float added = -0.0f;
  if (residual != nullptr) added = decode(sum.out_type, residual->bits(sum.out_type, column));
  return encode(sum.out_type, std::fma(sum.scale, decode(sum.out_type, y), added));
}

TEST_P(Rows, WeightedSum) {
  for (const DType row_type : kTypes) {
    for (const DType combine_type : kTypes) {
      for (const DType out_type : kTypes) {
        for (int repeat = 0; repeat < 40; ++repeat) {
          const int count = repeat < 10 ? repeat : static_cast<int>(below(random_, 35));
          const std::int64_t columns = kColumns[below(random_, std::size(kColumns))];
          std::vector<Memory> rows;
          std::vector<const void*> pointers;
          std::vector<float> weights;
          for (int r = 0; r < count; ++r) {
            rows.push_back(random_row(row_type, columns));
            weights.push_back(random_weight());
          }
          for (const Memory& row : rows) pointers.push_back(row.data());
          Memory out = empty_row(out_type, columns);
          const Memory residual = random_row(out_type, columns);
          const bool adds = repeat % 4 == 1;
          const cpu::RowSum sum{.out = out.data(),
                                .out_type = out_type,
                                .rows = pointers.data(),
                                .row_type = row_type,
                                .combine_type = combine_type,
                                .weights = repeat % 3 == 0 ? nullptr : weights.data(),
                                .count = count,
                                .columns = columns,
                                .store = any_store(),
                                .epilogue = repeat % 4 < 2,
                                .residual = adds ? residual.data() : nullptr,
                                .scale = random_weight()};
          kernels_.weighted_sum(sum);
          cpu::stream_fence();
          ASSERT_TRUE(out.guards_intact());
          for (std::int64_t c = 0; c < columns; ++c) {
            ASSERT_EQ(out.bits(out_type, c), expected_sum(sum, rows, c, adds ? &residual : nullptr))
                << to_string(row_type) << " by " << to_string(combine_type) << " to " << to_string(out_type)
                << ", " << count << " rows, " << columns << " columns, column " << c;
          }
        }
      }
    }
  }
}

TEST_P(Rows, NoRowsSumToPositiveZero) {
  Memory out(100 * 4);
  kernels_.weighted_sum({.out = out.data(), .out_type = DType::fp32, .columns = 100});
  for (int c = 0; c < 100; ++c) ASSERT_EQ(out.bits(DType::fp32, c), 0u);
}

float expected_dot(const Memory& a, DType a_type, const Memory& b, DType b_type, std::int64_t columns) {
  std::array<float, 256> acc{};
  for (std::int64_t c = 0; c < columns; ++c) {
    acc[c % 256] =
        std::fma(decode(a_type, a.bits(a_type, c)), decode(b_type, b.bits(b_type, c)), acc[c % 256]);
  }
  std::array<float, 32> s{};
  for (int g = 0; g < 32; ++g) {
    const float* x = &acc[8 * g];
    s[g] = ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
  }
  for (int half = 16; half >= 1; half /= 2) {
    for (int g = 0; g < half; ++g) s[g] = s[g] + s[g + half];
  }
  return s[0];
}

TEST_P(Rows, Dot) {
  for (const DType a_type : kTypes) {
    for (const DType b_type : kTypes) {
      for (const std::int64_t columns : {0, 1, 8, 255, 256, 257, 300, 1000, 7168}) {
        // Mostly rows without infinities and NaN, which would make every result NaN.
        Memory a = random_row(a_type, columns), b = random_row(b_type, columns);
        if (random_() % 4 != 0) {
          for (std::int64_t c = 0; c < columns; ++c) {
            if (!std::isfinite(decode(a_type, a.bits(a_type, c)))) a.set_bits(a_type, c, 0);
            if (!std::isfinite(decode(b_type, b.bits(b_type, c)))) b.set_bits(b_type, c, 0);
            if (std::fabs(decode(a_type, a.bits(a_type, c))) > 1e9f) a.set_bits(a_type, c, 0);
            if (std::fabs(decode(b_type, b.bits(b_type, c))) > 1e9f) b.set_bits(b_type, c, 0);
          }
        }
        const float result = kernels_.dot(a.data(), a_type, b.data(), b_type, columns);
        ASSERT_EQ(encode(DType::fp32, result),
                  encode(DType::fp32, expected_dot(a, a_type, b, b_type, columns)));
        std::uint32_t bits;
        std::memcpy(&bits, &result, sizeof bits);
        ASSERT_EQ(bits, encode(DType::fp32, result)) << "a NaN that is not canonical";
      }
    }
  }
}

// ---- Copies and zeroes memory of every size and alignment, and checks that guard bytes around it are
// intact.

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
