#include "ferry/trace.hpp"

#include "base/environment.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"
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

}  // namespace ferry
