// Random numbers, ln and exp with the same bits on every machine, for synthetic traces, which are defined to
// the bit.
#pragma once

#include <cmath>
#include <cstdint>

namespace ferry::trace {

// These use IEEE additions, multiplications and divisions alone. std::log and std::exp may differ between
// standard libraries in the last place.

inline constexpr double kLn2 = 0.693147180559945309417232121458;
inline constexpr double kSqrtHalf = 0.707106781186547524400844362105;

// x > 0 and finite. Relative error below 1e-14; near x = 1, absolute error below 1e-16.
//
// x = m * 2^e with m near 1; ln m = 2 artanh(t) = 2 (t + t^3/3 + t^5/5 + ...), t = (m-1)/(m+1), |t| < 0.172.
inline double portable_ln(double x) {
  int exponent = 0;
  double m = std::frexp(x, &exponent);
  if (m < kSqrtHalf) {
    m *= 2;
    --exponent;
  }
  const double t = (m - 1) / (m + 1);
  const double square = t * t;
  double sum = 0;
  for (int power = 21; power >= 1; power -= 2) sum = sum * square + 1.0 / power;
  return exponent * kLn2 + 2 * t * sum;
}

// |x| <= 700. Relative error below 1e-14.
//
// x = r + n ln 2 with |r| <= ln(2)/2; exp r by its Taylor series.
inline double portable_exp(double x) {
  const double n = std::floor(x / kLn2 + 0.5);
  const double r = x - n * kLn2;
  double sum = 1;
  for (int i = 16; i >= 1; --i) sum = 1 + sum * r / i;
  return std::ldexp(sum, static_cast<int>(n));
}

// The distributions of the standard library are not the same on every machine.
//
// splitmix64 (Steele, Lea, Flood 2014: "Fast splittable pseudorandom number generators").
class Random {
 public:
  // Streams of one seed do not overlap in practice, because each starts at a state mixed from seed and
  // stream.
  Random(std::uint64_t seed, std::uint64_t stream) : state_(mix(mix(seed) + stream)) {}

  std::uint64_t bits() { return mix(state_ += 0x9e3779b97f4a7c15u); }

  // In (0, 1), both ends excluded.
  double uniform() { return (static_cast<double>(bits() >> 11) + 0.5) * 0x1p-53; }

  // In [0, bound), bound > 0. The remainder's bias of bound / 2^64 is too small to show in a trace.
  std::uint64_t below(std::uint64_t bound) { return bits() % bound; }

  // Exponential with mean 1.
  double exponential() { return -portable_ln(uniform()); }

  // Standard normal, by Marsaglia's polar method.
  double normal() {
    for (;;) {
      const double x = 2 * uniform() - 1;
      const double y = 2 * uniform() - 1;
      const double square = x * x + y * y;
      if (square > 0 && square < 1) return x * std::sqrt(-2 * portable_ln(square) / square);
    }
  }

 private:
  static std::uint64_t mix(std::uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

  std::uint64_t state_;
};

}  // namespace ferry::trace
