#include "oracle/gather.hpp"

#include "oracle/numbers.hpp"

namespace ferry::oracle {

Bytes gathered(const std::vector<Bytes>& rows_of_ranks) {
  Bytes all;
  for (const Bytes& rows : rows_of_ranks) all.insert(all.end(), rows.begin(), rows.end());
  return all;
}

Bytes scattered_sums(const std::vector<Bytes>& rows_of_ranks, DType type, std::int64_t columns,
                     std::int64_t first, std::int64_t count) {
  const std::int64_t value_bytes = bytes_of(type);
  Bytes sums(static_cast<std::size_t>(count * columns * value_bytes));
  for (std::int64_t value = 0; value < count * columns; ++value) {
    float sum = 0;
    for (const Bytes& rows : rows_of_ranks)
      sum += load(type, rows.data() + (first * columns + value) * value_bytes);
    store(type, sum, sums.data() + value * value_bytes);
  }
  return sums;
}

}  // namespace ferry::oracle
