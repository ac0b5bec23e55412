// Feeds the trace reader arbitrary bytes. It must either accept a file, and then all of the trace can be
// used, or refuse it with a UsageError. The sanitizers check everything else.
#include <cstdlib>
#include <optional>

#include "ferry/error.hpp"
#include "fuzz/trace_input.hpp"
#include "trace/trace.hpp"

namespace {

using ferry::trace::NpyArray;

NpyArray array(const char* file, std::span<const std::byte> bytes) {
  return NpyArray(file, {bytes.begin(), bytes.end()});
}

std::optional<NpyArray> array_if_any(const char* file, std::span<const std::byte> bytes) {
  if (bytes.empty()) return std::nullopt;
  return array(file, bytes);
}

void require(bool holds) {
  if (!holds) std::abort();
}

void check(const ferry::Trace& trace) {
  const auto routes = static_cast<std::size_t>(trace.layers * trace.tokens * trace.top_k);
  require(trace.ids.size() == routes && (trace.weights.empty() || trace.weights.size() == routes));
  for (const std::int32_t id : trace.ids) require(id >= -1 && id < trace.experts);
  std::int64_t tokens = 0;
  for (const std::int64_t length : trace.sequence_lengths) tokens += length;
  require(trace.sequence_lengths.empty() || tokens == trace.tokens);
  for (int layer = 0; layer < trace.layers; ++layer) {
    const double overlap = ferry::adjacent_overlap(trace, layer);
    require(overlap >= 0 && overlap <= trace.top_k);
    const ferry::TracePartition part =
        ferry::partition(trace, {.layer = layer, .rank = 1, .ranks = 3, .tokens_per_rank = 5, .step = 7});
    require(part.ids.size() == static_cast<std::size_t>(5 * trace.top_k));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  if (bytes.size() < trace_fuzz::kPrefix) return -1;
  const trace_fuzz::Input input = trace_fuzz::unpack(bytes);
  try {
    const NpyArray ids = array("ids.npy", input.ids);
    const auto weights = array_if_any("weights.npy", input.weights);
    const auto lengths = array_if_any("seqlens.npy", input.lengths);
    check(ferry::trace::trace_from_arrays(ids, weights ? &*weights : nullptr, lengths ? &*lengths : nullptr,
                                          input.experts, 0));
  } catch (const ferry::UsageError&) {
  }
  return 0;
}
