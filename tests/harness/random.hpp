// Random numbers that depend on the seed alone, so that every rank and machine draws the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

namespace ferry::contract {

// SplitMix64.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  // An independent sequence for each list of numbers.
  static Random of(std::initializer_list<std::uint64_t> numbers) {
    Random mixed(0x9E3779B97F4A7C15);
    for (const std::uint64_t number : numbers) mixed = Random(mixed.next() ^ number);
    return Random(mixed.next());
  }

  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9E3779B97F4A7C15);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
  }

  int below(std::int64_t bound) { return static_cast<int>(next() % static_cast<std::uint64_t>(bound)); }
  int between(std::int64_t low, std::int64_t high) { return static_cast<int>(low) + below(high - low + 1); }
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  bool chance(double probability) { return uniform() < probability; }

  template <class T>
  T pick(std::initializer_list<T> items) {
    return items.begin()[below(static_cast<std::int64_t>(items.size()))];
  }
  template <class T>
  void shuffle(std::vector<T>& items) {
    for (std::size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[below(i)]);
  }

 private:
  std::uint64_t state_;
};

}  // namespace ferry::contract
