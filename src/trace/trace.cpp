// Traces: recorded ones are read from NPY arrays.
#include "trace/trace.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <limits>
#include <new>
#include <optional>
#include <string_view>

#include "base/environment.hpp"
#include "base/text.hpp"
#include "exchange/configuration.hpp"
#include "ferry/error.hpp"
#include "ferry/types.hpp"

namespace ferry::trace {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kMaxInt = std::numeric_limits<std::int32_t>::max();

struct KnownModel {
  std::string_view folder;
  int experts;
};
constexpr std::array kKnownModels = {KnownModel{"deepseek_v2_lite", 64}, KnownModel{"olmoe_1b_7b", 64}};

std::size_t to_size(std::int64_t n) {
  return static_cast<std::size_t>(n);
}

// A trace with layers, tokens and top_k from the shape of the ids, and nothing else.
Trace empty_trace(const NpyArray& ids) {
  std::vector<std::uint64_t> shape = ids.shape();
  if (shape.size() == 2) shape.insert(shape.begin(), 1);
  if (shape.size() != 3) {
    throw UsageError(str(ids.file(),
                         ": expected ids of shape [layers, tokens, top_k] or [tokens, top_k], found ",
                         shape_text(ids.shape())));
  }
  const bool fits = shape[0] >= 1 && shape[0] <= kMaxInt && shape[1] >= 1 && shape[1] <= kMaxInt &&
                    shape[2] >= 1 && shape[2] <= kMaxTopK;
  if (!fits) {
    throw UsageError(str(ids.file(), ": expected 1 to ", kMaxInt, " layers and tokens, top_k 1 to ", kMaxTopK,
                         ", found shape ", shape_text(ids.shape())));
  }
  Trace trace;
  trace.layers = static_cast<int>(shape[0]);
  trace.tokens = static_cast<std::int64_t>(shape[1]);
  trace.top_k = static_cast<int>(shape[2]);
  return trace;
}

std::int64_t largest_id(const NpyArray& ids) {
  std::int64_t largest = -1;
  for (std::uint64_t i = 0; i < ids.size(); ++i) largest = std::max(largest, ids.integer(i));
  return largest;
}

// Returns E. `why` receives how it was determined.
int choose_experts(const NpyArray& ids, int given, int known, std::string& why) {
  if (given > kMostExperts) {
    throw UsageError(str(ids.file(), ": expected at most ", kMostExperts, " experts, found ", given));
  }
  if (given > 0) {
    why = "as given";
    return given;
  }
  if (known > 0) {
    why = "known from the folder";
    return known;
  }
  const std::int64_t largest = largest_id(ids);
  if (largest >= kMostExperts) {
    throw UsageError(str(ids.file(), ": expected ids below ", kMostExperts,
                         ", the most experts of an exchange, found ", largest));
  }
  std::int64_t experts = 1;
  while (experts <= largest) experts *= 2;
  why = "assumed: least power of two above the largest id, " + std::to_string(largest);
  return static_cast<int>(experts);
}

void read_ids(const NpyArray& array, Trace& trace) {
  trace.ids.resize(to_size(static_cast<std::int64_t>(array.size())));
  for (std::uint64_t i = 0; i < array.size(); ++i) {
    const std::int64_t id = array.integer(i);
    if (id < -1 || id >= trace.experts) {
      const auto k = static_cast<std::uint64_t>(trace.top_k);
      const auto tokens = static_cast<std::uint64_t>(trace.tokens);
      throw UsageError(str(array.file(), ": expected ids from -1 to ", trace.experts - 1, " (",
                           counted(trace.experts, "expert"), "), found ", id, " at layer ", i / k / tokens,
                           ", token ", i / k % tokens, ", slot ", i % k));
    }
    trace.ids[i] = static_cast<std::int32_t>(id);
  }
}

void read_weights(const NpyArray& array, const NpyArray& ids, Trace& trace) {
  if (is_integer(array.type())) {
    throw UsageError(str(array.file(), ": expected weights of type <f2 or <f4, found ", descr(array.type())));
  }
  if (array.shape() != ids.shape()) {
    throw UsageError(str(array.file(), ": expected the shape of the ids, ", shape_text(ids.shape()),
                         ", found ", shape_text(array.shape())));
  }
  trace.weights.resize(trace.ids.size());
  for (std::uint64_t i = 0; i < array.size(); ++i) trace.weights[i] = array.real(i);
}

void read_lengths(const NpyArray& array, Trace& trace) {
  if (!is_integer(array.type()) || array.shape().size() != 1) {
    throw UsageError(str(array.file(), ": expected integers of shape [sequences], found type ",
                         descr(array.type()), ", shape ", shape_text(array.shape())));
  }
  // In memory a length takes eight bytes.
  if (constexpr std::uint64_t kMost = 1 << 23; bytes_of(array.type()) == 1 && array.size() > kMost) {
    throw UsageError(str(array.file(), ": expected at most ", kMost, " lengths of one byte each, found ",
                         array.size(), ": save them in integers of two bytes or more"));
  }
  trace.sequence_lengths.reserve(array.size());
  std::int64_t left = trace.tokens;
  for (std::uint64_t i = 0; i < array.size(); ++i) {
    const std::int64_t length = array.integer(i);
    if (length < 0 || length > left) {
      throw UsageError(str(array.file(), ": sequence ", i, ": expected a length from 0 to ", left,
                           " (the ids have ", counted(trace.tokens, "token"), "), found ", length));
    }
    trace.sequence_lengths.push_back(length);
    left -= length;
  }
  if (left != 0) {
    throw UsageError(str(array.file(), ": expected lengths that sum to ", counted(trace.tokens, "token"),
                         ", found ", trace.tokens - left));
  }
}

int known_experts(const fs::path& file) {
  const std::string folder = fs::absolute(file).parent_path().filename().string();
  for (const KnownModel& model : kKnownModels) {
    if (model.folder == folder) return model.experts;
  }
  return 0;
}

std::optional<NpyArray> read_if_there(const std::string& path) {
  if (!fs::exists(path)) return std::nullopt;
  return open_npy(path);
}

const NpyArray* pointer(const std::optional<NpyArray>& array) {
  return array ? &*array : nullptr;
}

std::string find_ids(const std::string& name, const std::string& directory) {
  if (name.ends_with(".npy")) return name;
  if (directory.empty()) {
    throw UsageError(str("recorded trace '", name,
                         "': FERRY_TRACES is not set; set it to the folder that holds recorded traces, ",
                         "give a path that ends in .npy, or use a synthesised trace such as synth:decode"));
  }
  if (!fs::is_directory(directory)) {
    throw UsageError(str("recorded trace '", name, "': ", directory,
                         " (from FERRY_TRACES, unless a directory ", "was given) is not a folder"));
  }
  const std::string base = (fs::path(directory) / name).string();
  for (const char* ending : {".ids.npy", ".exact_top8.npy"}) {
    if (fs::exists(base + ending)) return base + ending;
  }
  throw UsageError(str("recorded trace '", name, "': found neither ", base, ".ids.npy nor ", base,
                       ".exact_top8.npy; `ferry trace list` lists the traces in FERRY_TRACES"));
}

}  // namespace

Trace trace_from_arrays(const NpyArray& ids, const NpyArray* weights, const NpyArray* lengths, int experts,
                        int known_experts) {
  if (!is_integer(ids.type())) {
    throw UsageError(str(ids.file(), ": expected ids of an integer type, found ", descr(ids.type())));
  }
  Trace trace = empty_trace(ids);
  std::string why;
  trace.experts = choose_experts(ids, experts, known_experts, why);
  read_ids(ids, trace);
  if (weights) read_weights(*weights, ids, trace);
  if (lengths) read_lengths(*lengths, trace);
  trace.name = ids.file();
  // Without the path of the file, because results that hold this text are published. The name identifies the
  // trace.
  trace.source = "recorded; " + std::to_string(trace.experts) + " experts (" + why + "); weights " +
                 (weights ? "recorded" : "not recorded, 1/" + std::to_string(trace.top_k) + " each");
  return trace;
}

// Opens `name` (see open_trace()) in `directory`. experts = 0: derived from the folder or the ids.
static Trace open_recorded(const std::string& name, const std::string& directory, int experts) {
  const std::string path = find_ids(name, directory);
  const NpyArray ids = open_npy(path);
  std::optional<NpyArray> weights, lengths;
  constexpr std::string_view kEnding = ".ids.npy";
  if (path.ends_with(kEnding)) {
    const std::string base = path.substr(0, path.size() - kEnding.size());
    weights = read_if_there(base + ".weights.npy");
    lengths = read_if_there(base + ".seqlens.npy");
  }
  try {
    Trace trace = trace_from_arrays(ids, pointer(weights), pointer(lengths), experts, known_experts(path));
    trace.name = name;
    return trace;
  } catch (const std::bad_alloc&) {
    throw SystemError(str(path, ": no memory for its ", counted(ids.size(), "id")), ENOMEM);
  }
}

}  // namespace ferry::trace

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
