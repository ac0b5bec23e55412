#include "trace/npy.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "ferry/error.hpp"
#include "trace/files.hpp"

namespace {

using namespace trace_test;
using ferry::trace::NpyArray;
using ferry::trace::NpyType;

NpyArray parse(const std::string& file) {
  return NpyArray("made.npy", to_bytes(file));
}

template <class T>
void expect_integers(const std::string& descr, NpyType type) {
  SCOPED_TRACE(descr);
  const std::uint64_t s = seed();
  SCOPED_TRACE("FERRY_SEED=" + std::to_string(s));
  std::mt19937_64 random(s);
  std::vector<T> values = {std::numeric_limits<T>::min(), 0, 1, std::numeric_limits<T>::max()};
  for (int i = 0; i < 20; ++i) values.push_back(static_cast<T>(random()));
  if constexpr (std::is_same_v<T, std::uint64_t>) {
    for (T& value : values) value >>= 1;  // values above int64 are refused: RefusesIntegersBeyondInt64
  }
  for (int major = 1; major <= 3; ++major) {
    const NpyArray array = parse(npy(header(descr, "(2, 3, 4)"), raw(values), major));
    EXPECT_EQ(array.type(), type);
    EXPECT_EQ(array.shape(), (std::vector<std::uint64_t>{2, 3, 4}));
    ASSERT_EQ(array.size(), values.size());
    for (std::size_t i = 0; i < values.size(); ++i)
      EXPECT_EQ(array.integer(i), static_cast<std::int64_t>(values[i])) << i;
  }
}

TEST(Npy, ReadsEveryIntegerTypeInEveryVersion) {
  expect_integers<std::uint8_t>("|u1", NpyType::uint8);
  expect_integers<std::uint8_t>("<u1", NpyType::uint8);
  expect_integers<std::int8_t>("|i1", NpyType::int8);
  expect_integers<std::uint16_t>("<u2", NpyType::uint16);
  expect_integers<std::int16_t>("<i2", NpyType::int16);
  expect_integers<std::uint32_t>("<u4", NpyType::uint32);
  expect_integers<std::int32_t>("<i4", NpyType::int32);
  expect_integers<std::uint64_t>("<u8", NpyType::uint64);
  expect_integers<std::int64_t>("<i8", NpyType::int64);
}

TEST(Npy, RefusesIntegersBeyondInt64) {
  const NpyArray array = parse(npy(header("<u8", "(2,)"), raw<std::uint64_t>({7, 1ull << 63})));
  EXPECT_EQ(array.integer(0), 7);
  EXPECT_THROWS(array.integer(1), ferry::UsageError, "found 9223372036854775808");
}

TEST(Npy, ReadsFloat32ToTheBit) {
  const std::vector<float> values = {0.0f,   -0.0f,  1.5f,
                                     1e-45f, -3e38f, std::numeric_limits<float>::infinity()};
  const NpyArray array = parse(npy(header("<f4", "(6,)"), raw(values)));
  EXPECT_EQ(array.type(), NpyType::float32);
  for (std::size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(std::signbit(array.real(i)), std::signbit(values[i])) << i;
    EXPECT_EQ(array.real(i), values[i]) << i;
  }
}

// The value of binary16 bits by definition, in double.
double half_value(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  const double fraction = bits & 1023;
  const double sign = bits >> 15 ? -1 : 1;
  if (exponent == 31) return fraction == 0 ? sign * INFINITY : NAN;
  if (exponent == 0) return sign * fraction * std::pow(2.0, -24);
  return sign * (1 + fraction / 1024) * std::pow(2.0, exponent - 15);
}

TEST(Npy, ConvertsEveryFloat16Exactly) {
  std::vector<std::uint16_t> all(65536);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
  const NpyArray array = parse(npy(header("<f2", "(65536,)"), raw(all)));
  for (std::size_t i = 0; i < all.size(); ++i) {
    const double expected = half_value(all[i]);
    const float found = array.real(i);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(found)) << i;
    } else {
      ASSERT_EQ(static_cast<double>(found), expected) << i;
      ASSERT_EQ(std::signbit(found), std::signbit(expected)) << i;
    }
  }
}

TEST(Npy, AcceptsZeroToFourDimensionsAndEmptyArrays) {
  EXPECT_EQ(parse(npy(header("<i4", "()"), raw<std::int32_t>({5}))).integer(0), 5);
  EXPECT_EQ(parse(npy(header("<i4", "(1,)"), raw<std::int32_t>({5}))).size(), 1u);
  EXPECT_EQ(parse(npy(header("<i4", "(1, 2, 1, 1)"), raw<std::int32_t>({5, 6}))).shape().size(), 4u);
  EXPECT_EQ(parse(npy(header("<i4", "(1,2,1,1,)"), raw<std::int32_t>({5, 6}))).shape().size(), 4u);
  EXPECT_EQ(parse(npy(header("<i4", "(3, 0, 6)"), "")).size(), 0u);
}

TEST(Npy, AcceptsKeysInAnyOrderAndEitherQuote) {
  const std::string text = "{ \"shape\":(2,),\"fortran_order\":False , \"descr\":\"|u1\"}\n";
  EXPECT_EQ(parse(npy(text, "\x05\x06")).integer(1), 6);
}

template <class T>
std::vector<T> random_values(std::size_t count, std::mt19937_64& random) {
  std::vector<T> values(count);
  for (T& value : values) value = static_cast<T>(static_cast<std::int64_t>(random()));
  return values;
}

TEST(Npy, ReadsWhatItWrote) {
  const std::uint64_t s = seed();
  SCOPED_TRACE("FERRY_SEED=" + std::to_string(s));
  std::mt19937_64 random(s);
  const TempFolder folder;
  for (const std::vector<std::uint64_t>& shape :
       {std::vector<std::uint64_t>{}, {1}, {0}, {7}, {3, 5}, {2, 3, 4}, {2, 1, 3, 2}}) {
    std::size_t size = 1;
    for (const std::uint64_t dimension : shape) size *= dimension;
    const auto narrow = random_values<std::int32_t>(size, random);
    const auto wide = random_values<std::int64_t>(size, random);
    const auto real = random_values<float>(size, random);
    ferry::trace::write_npy(folder / "narrow.npy", shape, std::span(narrow));
    ferry::trace::write_npy(folder / "wide.npy", shape, std::span(wide));
    ferry::trace::write_npy(folder / "real.npy", shape, std::span(real));
    const NpyArray narrow_read = ferry::trace::open_npy(folder / "narrow.npy");
    const NpyArray wide_read = ferry::trace::open_npy(folder / "wide.npy");
    const NpyArray real_read = ferry::trace::open_npy(folder / "real.npy");
    EXPECT_EQ(narrow_read.shape(), shape);
    EXPECT_EQ(wide_read.shape(), shape);
    EXPECT_EQ(real_read.shape(), shape);
    for (std::size_t i = 0; i < size; ++i) {
      EXPECT_EQ(narrow_read.integer(i), narrow[i]);
      EXPECT_EQ(wide_read.integer(i), wide[i]);
      EXPECT_EQ(real_read.real(i), real[i]);
    }
  }
}

TEST(Npy, WritesTheBytesThatTheFormatSpecifies) {
  const TempFolder folder;
  const std::uint64_t shape[] = {1, 2};
  const std::vector<std::int32_t> data = {-1, 258};
  ferry::trace::write_npy(folder / "x.npy", shape, std::span(data));
  std::ifstream in(folder / "x.npy", std::ios::binary);
  const std::string found((std::istreambuf_iterator<char>(in)), {});
  const std::string text = "{'descr': '<i4', 'fortran_order': False, 'shape': (1, 2), }";
  const std::string padded = text + std::string(128 - 10 - text.size() - 1, ' ') + "\n";
  EXPECT_EQ(found, npy(padded, raw(data)));
}

TEST(Npy, ReportsAFailedWriteAsASystemError) {
  const std::uint64_t shape[] = {1};
  const std::vector<std::int32_t> data = {1};
  EXPECT_THROWS(ferry::trace::write_npy("/nowhere/x.npy", shape, std::span(data)), ferry::SystemError,
                "/nowhere/x.npy: cannot open for writing");
  const std::vector<std::int32_t> large(1 << 16);
  const std::uint64_t large_shape[] = {large.size()};
  EXPECT_THROWS(ferry::trace::write_npy("/dev/full", large_shape, std::span(large)), ferry::SystemError,
                "/dev/full: cannot write");
}

}  // namespace
