// Binds routing traces and load statistics.
#include "ferry/trace.hpp"
#include "casters.hpp"

#include <algorithm>

#include "arrays/array.hpp"
#include "base/text.hpp"
#include "bindings.hpp"
#include "ferry/error.hpp"

namespace ferry::python {

using namespace nb::literals;

namespace {

template <class T>
nb::object copied(const std::vector<T>& values, Element element, const Shape& shape) {
  nb::object array = new_array(Framework::numpy, element, shape, kHost);
  std::copy(values.begin(), values.end(), static_cast<T*>(inspect(array, "values").data));
  return array;
}

std::vector<std::int64_t> counts_of(const nb::object& given) {
  const Array array = inspect(given, "counts");
  if (array.element != kInt64 || array.shape.size() != 1 || !is_host(array.device) || array.strides[0] != 1) {
    throw UsageError(str("counts: expected a dense int64 array of shape [any] on the host, got ",
                         name_of(array.element), " of shape ", shape_text(array.shape)));
  }
  const auto* first = static_cast<const std::int64_t*>(array.data);
  return {first, first + array.shape[0]};
}

void bind_statistics(nb::module_& module) {
  nb::class_<LoadStatistics>(
      module, "LoadStatistics",
      "How unevenly experts are chosen. `max` to `min` are loads divided by the mean load.")
      .def_ro("routes", &LoadStatistics::routes, "Sum of all loads.")
      .def_ro("max", &LoadStatistics::max, "The largest load.")
      .def_ro("p99", &LoadStatistics::p99, "99th percentile.")
      .def_ro("p90", &LoadStatistics::p90, "90th percentile.")
      .def_ro("p50", &LoadStatistics::p50, "Median.")
      .def_ro("p10", &LoadStatistics::p10, "10th percentile.")
      .def_ro("min", &LoadStatistics::min, "The smallest load.")
      .def_ro("sigma_ln", &LoadStatistics::sigma_ln, "Standard deviation of ln(load), loads above 0.")
      .def_ro("gini", &LoadStatistics::gini, "Gini coefficient.")
      .def_ro("idle", &LoadStatistics::idle, "Experts without a route.")
      .def("__repr__", [](const LoadStatistics& s) {
        return str("LoadStatistics(routes=", s.routes, ", max=", s.max, ", p99=", s.p99, ", p90=", s.p90,
                   ", p50=", s.p50, ", p10=", s.p10, ", min=", s.min, ", sigma_ln=", s.sigma_ln,
                   ", gini=", s.gini, ", idle=", s.idle, ")");
      });
  module.def(
      "load_statistics", [](const nb::object& counts) { return load_statistics(counts_of(counts)); },
      "counts"_a,
      "LoadStatistics of the routes to each expert, int64 [E]. UsageError for no experts or a sum of 0.");
  module.def(
      "rank_counts",
      [](const nb::object& counts, const Placement& placement) {
        const std::vector<std::int64_t> experts = counts_of(counts);
        if (static_cast<int>(experts.size()) != placement.experts()) {
          throw UsageError(str("counts: expected one for each of the placement's ",
                               counted(placement.experts(), "expert"), ", got ", experts.size()));
        }
        const std::vector<std::int64_t> ranks = rank_counts(experts, placement);
        return copied(ranks, kInt64, {static_cast<std::int64_t>(ranks.size())});
      },
      "counts"_a, "placement"_a,
      "int64 [R]: routes to each rank, for routes to each expert, `counts` int64 [E]. With "
      "replicas: Trace.rank_counts.");
}

}  // namespace

void bind_trace(nb::module_& module) {
  nb::class_<Trace>(module, "Trace", "Which experts a router chose, token by token, recorded or synthesised.")
      .def_ro("name", &Trace::name, "The name given to open_trace.")
      .def_ro("source", &Trace::source, "Where it comes from, in words.")
      .def_ro("layers", &Trace::layers, "Number of layers.")
      .def_ro("tokens", &Trace::tokens, "Tokens of one layer.")
      .def_ro("top_k", &Trace::top_k, "K, experts of a token.")
      .def_ro("experts", &Trace::experts, "E, the number of experts.")
      .def_ro("sequence_lengths", &Trace::sequence_lengths,
              "Tokens of each sequence, in order; empty if they are not known.")
      .def_prop_ro(
          "ids", [](const Trace& t) { return copied(t.ids, kInt32, {t.layers, t.tokens, t.top_k}); },
          "int32 [layers, tokens, K]: expert ids, -1 for a masked slot. A copy.")
      .def_prop_ro(
          "weights", [](const Trace& t) { return copied(t.weights, kFp32, {t.layers, t.tokens, t.top_k}); },
          "float32 [layers, tokens, K]: router weights. A copy.")
      .def(
          "partition",
          [](const Trace& t, int layer, int rank, int ranks, std::int64_t tokens, std::int64_t step) {
            const TracePartition part = partition(t, {layer, rank, ranks, tokens, step});
            const Shape shape{tokens, t.top_k};
            return nb::make_tuple(copied(part.ids, kInt32, shape), copied(part.weights, kFp32, shape));
          },
          "layer"_a, "rank"_a, "ranks"_a, "tokens_per_rank"_a, "step"_a = 0,
          "The tokens of one rank in one call: (ids int32, weights float32), both [tokens_per_rank, K]. Step "
          "s + 1 "
          "continues where step s ends.")
      .def(
          "expert_counts",
          [](const Trace& t, int layer) { return copied(expert_counts(t, layer), kInt64, {t.experts}); },
          "layer"_a, "int64 [E]: routes to each expert in a layer.")
      .def(
          "rank_counts",
          [](const Trace& t, int layer, const Placement& placement, std::int64_t tokens) {
            return copied(rank_counts(t, layer, placement, tokens), kInt64, {placement.ranks()});
          },
          "layer"_a, "placement"_a, "tokens_per_rank"_a = 0,
          "int64 [R]: routes to each rank in a layer, as an exchange sends them, also with replicas. 0: the "
          "whole trace is one step.")
      .def("save", &save_trace, "prefix"_a,
           "Writes PREFIX.ids.npy and PREFIX.weights.npy, which open_trace reads back.")
      .def("__repr__", [](const Trace& t) {
        return str("Trace('", t.name, "', layers=", t.layers, ", tokens=", t.tokens, ", top_k=", t.top_k,
                   ", experts=", t.experts, ")");
      });
  module.def(
      "open_trace",
      [](const std::string& name, const std::string& directory, int experts) {
        return open_trace(name, {.directory = directory, .experts = experts});
      },
      "name"_a, "directory"_a = "", "experts"_a = 0,
      R"(Opens a routing trace.

`name` is 'synth:decode', 'synth:prefill' or 'synth:uniform', each also with '-grouped' and with ':key=value,...'; or the
name of a recorded trace in `directory` (default: environment variable FERRY_TRACES); or a path that ends in .npy.)");
  bind_statistics(module);
}

}  // namespace ferry::python
