#include <algorithm>

#include "base/environment.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"
#include "ferry/trace.hpp"
#include "trace/npy.hpp"
#include "trace/recorded.hpp"

namespace ferry {
namespace {

template <class T>
std::span<const T> layer_of(const Trace& trace, const std::vector<T>& all, int layer) {
  if (layer < 0 || layer >= trace.layers) {
    throw UsageError(str("trace '", trace.name, "': layer ", layer, " of ", trace.layers, " does not exist"));
  }
  if (all.empty()) return {};
  const auto size = static_cast<std::size_t>(trace.tokens) * static_cast<std::size_t>(trace.top_k);
  return std::span(all).subspan(static_cast<std::size_t>(layer) * size, size);
}

}  // namespace

std::span<const std::int32_t> Trace::layer_ids(int layer) const {
  return layer_of(*this, ids, layer);
}

std::span<const float> Trace::layer_weights(int layer) const {
  return layer_of(*this, weights, layer);
}

Trace open_trace(const std::string& name, const TraceOptions& options) {
  if (name.starts_with("synth:")) return synthesise(parse_synth_spec(name, options.synth));
  if (options.experts < 0) {
    throw UsageError(str("trace '", name, "': expected experts = 0 (derived from the trace) or more, found ",
                         options.experts));
  }
  return trace::open_recorded(
      name, options.directory.empty() ? Environment::read().traces : options.directory, options.experts);
}

void save_trace(const Trace& trace, const std::string& prefix) {
  const std::uint64_t shape[] = {static_cast<std::uint64_t>(trace.layers),
                                 static_cast<std::uint64_t>(trace.tokens),
                                 static_cast<std::uint64_t>(trace.top_k)};
  trace::write_npy(prefix + ".ids.npy", shape, std::span(trace.ids));
  const std::vector<float> equal(trace.weights.empty() ? trace.ids.size() : 0,
                                 1.0f / static_cast<float>(trace.top_k));
  trace::write_npy(prefix + ".weights.npy", shape, std::span(trace.weights.empty() ? equal : trace.weights));
  if (trace.sequence_lengths.empty()) return;
  const std::uint64_t sequences[] = {trace.sequence_lengths.size()};
  trace::write_npy(prefix + ".seqlens.npy", sequences, std::span(trace.sequence_lengths));
}

namespace {

constexpr std::int64_t kMaxTokens = 0x7fffffff;

void check(const Trace& trace, const PartitionSpec& spec) {
  if (trace.tokens < 1)
    throw UsageError(str("partition of trace '", trace.name, "': the trace has no tokens"));
  if (spec.ranks < 1 || spec.rank < 0 || spec.rank >= spec.ranks) {
    throw UsageError(str("partition of a trace: rank ", spec.rank, " of ", spec.ranks, " does not exist"));
  }
  if (spec.tokens_per_rank < 0 || spec.tokens_per_rank > kMaxTokens || spec.step < 0) {
    throw UsageError(str("partition of a trace: expected 0 to ", counted(kMaxTokens, "token"),
                         " per rank and step 0 or later, found ", counted(spec.tokens_per_rank, "token"),
                         ", step ", spec.step));
  }
}

// (step * ranks + rank) * tokens_per_rank, modulo the number of tokens. That number fits in 31 bits, so no
// product overflows.
std::uint64_t first_token(const PartitionSpec& spec, std::uint64_t tokens) {
  const auto step = static_cast<std::uint64_t>(spec.step) % tokens;
  const auto block =
      (step * static_cast<std::uint64_t>(spec.ranks) + static_cast<std::uint64_t>(spec.rank)) % tokens;
  return block * (static_cast<std::uint64_t>(spec.tokens_per_rank) % tokens) % tokens;
}

// `count` entries from `first` on, continuing at the start of the layer after its end.
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

TracePartition partition(const Trace& trace, const PartitionSpec& spec) {
  check(trace, spec);
  const auto ids = trace.layer_ids(spec.layer);
  const auto weights = trace.layer_weights(spec.layer);
  const auto k = static_cast<std::size_t>(trace.top_k);
  const std::uint64_t first = first_token(spec, static_cast<std::uint64_t>(trace.tokens));
  const std::size_t count = static_cast<std::size_t>(spec.tokens_per_rank) * k;
  return {.first_token = static_cast<std::int64_t>(first),
          .ids = wrapped(ids, first * k, count),
          .weights = weights.empty() ? std::vector<float>(count, 1.0f / static_cast<float>(trace.top_k))
                                     : wrapped(weights, first * k, count)};
}

}  // namespace ferry
