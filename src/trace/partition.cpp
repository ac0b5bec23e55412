#include <algorithm>

#include "base/text.hpp"
#include "ferry/error.hpp"
#include "ferry/trace.hpp"

namespace ferry {
namespace {

constexpr std::int64_t kMaxTokens = 0x7fffffff;

void check(const Trace& trace, const ShareOf& of) {
  if (trace.tokens < 1) throw UsageError(str("share of trace '", trace.name, "': it has no tokens"));
  if (of.ranks < 1 || of.rank < 0 || of.rank >= of.ranks) {
    throw UsageError(str("share of a trace: rank ", of.rank, " of ", of.ranks, " does not exist"));
  }
  if (of.tokens_per_rank < 0 || of.tokens_per_rank > kMaxTokens || of.step < 0) {
    throw UsageError(str("share of a trace: expected 0 to ", kMaxTokens,
                         " tokens per rank and step 0 or later, found ", of.tokens_per_rank, " tokens, step ",
                         of.step));
  }
}

// (step * ranks + rank) * tokens_per_rank modulo the trace. Its tokens fit 31 bits, so no product overflows.
std::uint64_t first_token(const ShareOf& of, std::uint64_t tokens) {
  const auto step = static_cast<std::uint64_t>(of.step) % tokens;
  const auto block =
      (step * static_cast<std::uint64_t>(of.ranks) + static_cast<std::uint64_t>(of.rank)) % tokens;
  return block * (static_cast<std::uint64_t>(of.tokens_per_rank) % tokens) % tokens;
}

template <class T>
std::vector<T> wrapped(std::span<const T> layer, std::size_t first, std::size_t count) {
  std::vector<T> out;
  out.reserve(count);
  while (out.size() < count) {
    const std::size_t n = std::min(count - out.size(), layer.size() - first);
    const auto block = layer.subspan(first, n);
    out.insert(out.end(), block.begin(), block.end());
    first = 0;
  }
  return out;
}

}  // namespace

Share share(const Trace& trace, const ShareOf& of) {
  check(trace, of);
  const auto ids = trace.layer_ids(of.layer);
  const auto weights = trace.layer_weights(of.layer);
  const auto k = static_cast<std::size_t>(trace.top_k);
  const std::uint64_t first = first_token(of, static_cast<std::uint64_t>(trace.tokens));
  const std::size_t count = static_cast<std::size_t>(of.tokens_per_rank) * k;
  return {.first_token = static_cast<std::int64_t>(first),
          .ids = wrapped(ids, first * k, count),
          .weights = wrapped(weights, first * k, count)};
}

}  // namespace ferry
