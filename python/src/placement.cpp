#include "ferry/placement.hpp"

#include <utility>
#include <vector>

#include "base/text.hpp"
#include "bindings.hpp"
#include "casters.hpp"
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

// The pickled state of a Placement: the arguments of placement_of(), and tp.
nb::tuple state_of(const Placement& placement) {
  nb::list locations;
  for (const auto& [rank, local] : placement.locations()) locations.append(nb::make_tuple(rank, local));
  return nb::make_tuple(nb::tuple(locations), placement.ranks(), placement.version(), placement.tp());
}

void set_placement_state(Placement* self, const nb::tuple& state) {
  const auto locations = nb::cast<Locations>(state[0]);
  const auto ranks = nb::cast<int>(state[1]);
  const auto version = nb::cast<std::uint64_t>(state[2]);
  const auto tp = nb::cast<int>(state[3]);
  if (locations.empty()) {
    new (self) Placement();
  } else if (tp > 1) {
    new (self) Placement(Placement::ep_tp(static_cast<int>(locations.size()), ranks / tp, tp));
  } else {
    new (self) Placement(placement_of(locations, ranks, version));
  }
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
      .def_prop_ro("experts", &Placement::experts, "E, the number of experts.")
      .def_prop_ro("ranks", &Placement::ranks, "R, the number of ranks.")
      .def_prop_ro("tp", &Placement::tp, "Slices of each expert: 1 unless made by ep_tp().")
      .def_prop_ro("version", &Placement::version, "The version given to table(); 0 for others.")
      .def(
          "location",
          [](const Placement& self, int expert) {
            if (expert < 0 || expert >= self.experts()) {
              throw UsageError(str("expert = ", expert, ", must be 0 to ", self.experts() - 1));
            }
            return std::pair(self.location(expert).rank, self.location(expert).local);
          },
          "expert"_a, "(rank, local expert) of an expert; ep_tp: of its slice 0.")
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
           nb::sig("def __getstate__(self) -> tuple[tuple[tuple[int, int], ...], int, int, int]"))
      .def("__setstate__", &set_placement_state,
           nb::sig(
               "def __setstate__(self, state: tuple[tuple[tuple[int, int], ...], int, int, int], /) -> None"))
      .def("__repr__", [](const Placement& self) {
        return str("Placement(", counted(self.experts(), "expert"), " on ", counted(self.ranks(), "rank"),
                   self.tp() > 1 ? str(", tp ", self.tp()) : str(", version ", self.version()), ")");
      });
}

}  // namespace ferry::python
