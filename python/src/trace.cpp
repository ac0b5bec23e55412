// Routing traces.
#include "ferry/trace.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

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
  std::copy(values.begin(), values.end(), static_cast<T*>(look_at(array, "values").data));
  return array;
}

std::vector<std::int64_t> counts_of(const nb::object& given) {
  const Array array = look_at(given, "counts");
  if (array.element != kInt64 || array.shape.size() != 1 || !is_host(array.device) || array.strides[0] != 1) {
    throw UsageError(str("counts: expected a dense int64 array of shape [any] on the host, got ",
                         name_of(array.element), " of shape ", text_of(array.shape)));
  }
  const auto* first = static_cast<const std::int64_t*>(array.data);
  return {first, first + array.shape[0]};
}

void bind_statistics(nb::module_& module) {
  nb::class_<LoadStatistics>(
      module, "LoadStatistics",
      "How unevenly experts are chosen; `max` to `min` are loads divided by the mean load.")
      .def_ro("routes", &LoadStatistics::routes, "sum of all loads")
      .def_ro("max", &LoadStatistics::max, "the largest load")
      .def_ro("p99", &LoadStatistics::p99, "99th percentile")
      .def_ro("p90", &LoadStatistics::p90, "90th percentile")
      .def_ro("p50", &LoadStatistics::p50, "median")
      .def_ro("p10", &LoadStatistics::p10, "10th percentile")
      .def_ro("min", &LoadStatistics::min, "the smallest load")
      .def_ro("sigma_ln", &LoadStatistics::sigma_ln, "standard deviation of ln(load), loads above 0")
      .def_ro("gini", &LoadStatistics::gini, "Gini coefficient")
      .def_ro("idle", &LoadStatistics::idle, "experts without a route")
      .def("__repr__", [](const LoadStatistics& s) {
        return str("LoadStatistics(routes=", s.routes, ", max=", s.max, ", p99=", s.p99, ", p90=", s.p90,
                   ", p50=", s.p50, ", p10=", s.p10, ", min=", s.min, ", sigma_ln=", s.sigma_ln,
                   ", gini=", s.gini, ", idle=", s.idle, ")");
      });
  module.def(
      "load_statistics", [](const nb::object& counts) { return load_statistics(counts_of(counts)); },
      "counts"_a, "LoadStatistics of routes to every expert, int64 [E]. UsageError for none, or a sum of 0.");
  module.def(
      "rank_counts",
      [](const nb::object& counts, const Placement& placement) {
        const std::vector<std::int64_t> experts = counts_of(counts);
        if (static_cast<int>(experts.size()) != placement.experts()) {
          throw UsageError(
              str("counts: of ", experts.size(), " experts, the placement has ", placement.experts()));
        }
        const std::vector<std::int64_t> ranks = rank_counts(experts, placement);
        return copied(ranks, kInt64, {static_cast<std::int64_t>(ranks.size())});
      },
      "counts"_a, "placement"_a, "int64 [R]: routes to each rank, for counts int64 [E].");
}

}  // namespace

void bind_trace(nb::module_& module) {
  nb::class_<Trace>(module, "Trace", "Which experts a router chose, token by token, recorded or synthesised.")
      .def_ro("name", &Trace::name, "what was asked for")
      .def_ro("source", &Trace::source, "where it comes from, in words")
      .def_ro("layers", &Trace::layers, "layers")
      .def_ro("tokens", &Trace::tokens, "of one layer")
      .def_ro("top_k", &Trace::top_k, "K")
      .def_ro("experts", &Trace::experts, "E")
      .def_prop_ro(
          "ids", [](const Trace& t) { return copied(t.ids, kInt32, {t.layers, t.tokens, t.top_k}); },
          "int32 [layers, tokens, K], a copy; -1 is a masked slot.")
      .def_prop_ro(
          "weights", [](const Trace& t) { return copied(t.weights, kFp32, {t.layers, t.tokens, t.top_k}); },
          "float32 [layers, tokens, K], a copy.")
      .def(
          "share",
          [](const Trace& t, int layer, int rank, int ranks, std::int64_t tokens, std::int64_t step) {
            const TracePartition part = partition(t, {layer, rank, ranks, tokens, step});
            const Shape shape{tokens, t.top_k};
            return nb::make_tuple(copied(part.ids, kInt32, shape), copied(part.weights, kFp32, shape));
          },
          "layer"_a, "rank"_a, "ranks"_a, "tokens_per_rank"_a, "step"_a = 0,
          "(ids, weights), [tokens_per_rank, K]: the part one rank plays in one call.")
      .def(
          "expert_counts",
          [](const Trace& t, int layer) { return copied(expert_counts(t, layer), kInt64, {t.experts}); },
          "layer"_a, "int64 [E]: routes to each expert in a layer.")
      .def("save", &save_trace, "prefix"_a,
           "Writes PREFIX.ids.npy and what goes with it; open_trace reads it back.")
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
      "Opens a trace: 'synth:decode', 'synth:prefill', 'synth:uniform' (also '-grouped', and "
      "':key=value,...'), the\n"
      "name of a recorded one in `directory` (default: environment variable FERRY_TRACES), or a path ending "
      "in .npy.");
  bind_statistics(module);
}

}  // namespace ferry::python
