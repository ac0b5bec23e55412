// Random numbers, ln and exp with the same bits on every machine, for synthetic traces, which are defined to
// the bit.
#pragma once

#include <cmath>
#include <cstdint>

namespace ferry::trace {

// These use IEEE additions, multiplications and divisions alone. std::log and std::exp may differ between
// standard libraries in the last place.

// x > 0 and finite. Relative error below 1e-14; near x = 1, absolute error below 1e-16.
double portable_ln(double x);

// |x| <= 700. Relative error below 1e-14.
double portable_exp(double x);

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
