#include "ferry/placement.hpp"

#include <utility>
#include <vector>

#include "arrays/array.hpp"
#include "base/text.hpp"
#include "bindings.hpp"
#include "casters.hpp"
#include "ferry/balance.hpp"
#include "ferry/error.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ferry::python {
namespace {

using Locations = std::vector<std::pair<int, int>>;  // [E]: (rank, local expert)

Placement placement_of(const Locations& locations, int ranks, std::uint64_t version) {
  std::vector<ExpertLocation> table;
  for (const auto& [rank, local] : locations) table.push_back({rank, local});
  return Placement::table(std::move(table), ranks, version);
}

using RankLists = std::vector<std::vector<int>>;  // [R][L]: the experts of each rank

RankLists rank_lists(const Placement& placement) {
  RankLists lists;
  for (int rank = 0; rank < placement.ranks(); ++rank) lists.push_back(placement.experts_of(rank));
  return lists;
}

// The pickled state of a Placement: the arguments of placement_of(), and tp. With replicas: the experts of
// each rank in place of the locations, their number, and tp 0.
nb::tuple state_of(const Placement& placement) {
  if (placement.has_replicas()) {
    nb::list ranks;
    for (const std::vector<int>& held : rank_lists(placement)) ranks.append(nb::tuple(nb::cast(held)));
    return nb::make_tuple(nb::tuple(ranks), placement.experts(), placement.version(), 0);
  }
  nb::list locations;
  for (const auto& [rank, local] : placement.locations()) locations.append(nb::make_tuple(rank, local));
  return nb::make_tuple(nb::tuple(locations), placement.ranks(), placement.version(), placement.tp());
}

void check_expert(const Placement& placement, int expert) {
  if (expert < 0 || expert >= placement.experts())
    throw UsageError(str("expert = ", expert, ", must be 0 to ", placement.experts() - 1));
}

void set_placement_state(Placement* self, const nb::tuple& state) {
  const auto ranks = nb::cast<int>(state[1]);
  const auto version = nb::cast<std::uint64_t>(state[2]);
  const auto tp = nb::cast<int>(state[3]);
  if (tp == 0) {
    new (self) Placement(Placement::replicas(nb::cast<RankLists>(state[0]), ranks, version));
    return;
  }
  const auto locations = nb::cast<Locations>(state[0]);
  if (locations.empty()) {
    new (self) Placement();
  } else if (tp > 1) {
    new (self) Placement(Placement::ep_tp(static_cast<int>(locations.size()), ranks / tp, tp));
  } else {
    new (self) Placement(placement_of(locations, ranks, version));
  }
}

std::vector<Placement> balance_of(const nb::object& loads, int ranks, int slots, int nodes, int groups,
                                  const std::vector<Placement>& earlier) {
  const nb::object array = nb::module_::import_("numpy").attr("ascontiguousarray")(loads, "float64");
  const Array values = inspect(array, "loads");
  if (nb::cast<int>(nb::module_::import_("numpy").attr("ndim")(loads)) != 2)
    throw UsageError(
        str("loads: expected an array of shape [layers, experts], got ", shape_text(values.shape)));
  const auto* const first = static_cast<const double*>(values.data);
  const std::int64_t count = values.shape[0] * values.shape[1];
  return balance({first, static_cast<std::size_t>(count)}, static_cast<int>(values.shape[0]),
                 static_cast<int>(values.shape[1]),
                 {.ranks = ranks, .slots = slots, .nodes = nodes, .groups = groups, .earlier = earlier});
}

}  // namespace

void bind_placement(nb::module_& module) {
  nb::class_<Placement>(module, "Placement", "Which rank holds which expert. Immutable.")
      .def_static("blocks", &Placement::blocks, "experts"_a, "ranks"_a,
                  "Blocks of neighbouring experts. The first experts % ranks ranks hold one expert more.")
      .def_static(
          "table", &placement_of, "locations"_a, "ranks"_a, "version"_a = 0,
          "Any table: the (rank, local expert) of each expert. UsageError if a rank's local experts are not "
          "0, 1, 2, ... once each.")
      .def_static("ep_tp", &Placement::ep_tp, "experts"_a, "ep"_a, "tp"_a,
                  "Experts in slices, on ep * tp ranks: slice i of expert e is on rank e // (experts // ep) "
                  "* tp + i. "
                  "The tp ranks that hold slices of the same experts pass the same tokens. "
                  "Not with 'cuda' in two hops, nor with 'nvshmem' between nodes.")
      .def_static(
          "replicas", &Placement::replicas, "experts_of_rank"_a, "experts"_a, "version"_a = 0,
          "Experts of which some live on several ranks, at most once on each: the experts of every rank "
          "in local order. UsageError if no rank holds an expert, or one holds it twice.")
      .def_prop_ro("experts", &Placement::experts, "E, the number of experts.")
      .def_prop_ro("ranks", &Placement::ranks, "R, the number of ranks.")
      .def_prop_ro("tp", &Placement::tp, "Slices of each expert: 1 unless made by ep_tp().")
      .def_prop_ro("version", &Placement::version,
                   "The version given to table() or replicas(); 0 for others.")
      .def_prop_ro("has_replicas", &Placement::has_replicas, "Whether an expert lives on several ranks.")
      .def_prop_ro("total_replicas", &Placement::total_replicas,
                   "P, the replicas of all experts together; E without replicas.")
      .def(
          "location",
          [](const Placement& self, int expert) {
            check_expert(self, expert);
            return std::pair(self.location(expert).rank, self.location(expert).local);
          },
          "expert"_a,
          "(rank, local expert) of an expert; ep_tp: of its slice 0; with replicas: of the first.")
      .def(
          "replicas_of",
          [](const Placement& self, int expert) {
            check_expert(self, expert);
            Locations found;
            for (const auto& [rank, local] : self.replicas_of(expert)) found.emplace_back(rank, local);
            return found;
          },
          "expert"_a, "(rank, local expert) of every replica of an expert, ascending by rank.")
      .def(
          "replica_of_route",
          [](const Placement& self, int expert, int token, int source, int slot) {
            check_expert(self, expert);
            const ExpertLocation found =
                self.location(expert, {.token = token, .source = source, .slot = slot});
            return std::pair(found.rank, found.local);
          },
          "expert"_a, nb::kw_only(), "token"_a, "source"_a, "slot"_a,
          "(rank, local expert) of the replica that a route to an expert takes. `source` is the rank of the "
          "token, 0 with replicated input.")
      .def(
          "experts_of",
          [](const Placement& self, int rank) {
            if (rank < 0 || rank >= self.ranks()) {
              throw UsageError(str("rank = ", rank, ", must be 0 to ", self.ranks() - 1));
            }
            return self.experts_of(rank);
          },
          "rank"_a, "The global ids of a rank's experts, in local order.")
      .def(nb::self == nb::self, nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__hash__", [](const Placement& self) { return nb::hash(state_of(self)); })
      .def("__getstate__", &state_of,
           nb::sig("def __getstate__(self) -> tuple[tuple[tuple[int, ...], ...], int, int, int]"))
      .def("__setstate__", &set_placement_state,
           nb::sig(
               "def __setstate__(self, state: tuple[tuple[tuple[int, ...], ...], int, int, int], /) -> None"))
      .def("__repr__", [](const Placement& self) {
        return str("Placement(", counted(self.experts(), "expert"), " on ", counted(self.ranks(), "rank"),
                   self.has_replicas() ? str(", ", self.total_replicas(), " replicas") : "",
                   self.tp() > 1 ? str(", tp ", self.tp()) : str(", version ", self.version()), ")");
      });
  module.def(
      "balance", &balance_of, "loads"_a, "ranks"_a, "slots"_a, "nodes"_a = 1, "groups"_a = 0,
      "earlier"_a = std::vector<Placement>(),
      R"(Finds a placement with replicas for each layer, under which all ranks have nearly the same load.

`loads` [layers, E]: the load of each expert, such as the sum of LoadCounts.experts. No rank holds more than `slots`
experts. With `nodes`, each of ranks / nodes consecutive ranks, all replicas of an expert are on one node, and so
are the E / `groups` neighbouring experts of a group. `earlier`: the placement of each layer that is in use, from
which few experts move. UsageError for loads that are negative or not finite, and for numbers that do not fit.)");
  module.def("moved_experts", &moved_experts, "before"_a, "after"_a,
             "Experts that a rank holds in `after` and not in `before`, summed over ranks.");
}

}  // namespace ferry::python
