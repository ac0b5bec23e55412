#include "plan.hpp"

#include <nanobind/stl/string.h>

#include <unordered_map>

#include "base/text.hpp"
#include "bindings.hpp"
#include "ferry/error.hpp"

namespace ferry::python {
namespace {

// One for each address that there has been. The interpreter's lock guards it.
std::unordered_map<const void*, std::uint64_t>& all_writes() {
  static std::unordered_map<const void*, std::uint64_t> writes;
  return writes;
}

using Table = std::int32_t* PlanView::*;

nb::object table(const PyPlan& self, Table which, const Shape& shape) {
  const PlanView view = view_plan(self.usable().storage(), self.shape);
  return view_of(self.framework, view.*which, kInt32, shape, {}, self.device, self.owner);
}

nb::object storage(const PyPlan& self) {
  return view_of(self.framework, self.usable().storage(), kByte,
                 {static_cast<std::int64_t>(self.plan.bytes())}, {}, self.device, self.owner);
}

PyPlan copy(const PyPlan& self) {
  PyPlan copied = self;
  if (self.framework == Framework::dlpack) copied.framework = Framework::numpy;
  const nb::object from =
      view_of(copied.framework, self.usable().storage(), kByte,
              {static_cast<std::int64_t>(self.plan.bytes())}, {}, self.device, self.owner);
  copied.owner = from.attr(self.framework == Framework::torch ? "clone" : "copy")();
  copied.plan = Plan::over(look_at(copied.owner, "plan").data, self.plan.bytes());
  copied.state.reset();
  copied.lane = -1;
  copied.writes = writes_to(copied.plan.storage());
  return copied;
}

}  // namespace

const Plan& PyPlan::usable() const {
  if (state && state->lanes[static_cast<std::size_t>(lane)].parity != parity) {
    throw UsageError(
        str("plan: it lay in the memory of lane ", lane,
            ", and a later dispatch there has overwritten it: keep plan.copy() of it, or give memory"));
  }
  if (writes != writes_to(plan.storage()))
    throw UsageError("plan: a later dispatch has written another one to its memory");
  // Results are as long as it says, and memory of the caller may hold anything.
  if (is_host(device)) {
    const PlanHeader& header = *view_plan(plan.storage(), shape).header;
    if (header.magic == kPlanMagic && header.tokens != tokens)
      throw UsageError(str("plan: was one of ", tokens, " tokens, its memory has one of ", header.tokens));
  }
  return plan;
}

std::uint64_t writes_to(const void* storage) {
  const auto found = all_writes().find(storage);
  return found == all_writes().end() ? 0 : found->second;
}

void count_write_to(const void* storage) {
  ++all_writes()[storage];
}

std::int64_t PyPlan::total() const {
  if (is_host(device)) return usable().total();
  if (known_total >= 0) return known_total;
  throw UsageError(
      "plan: its total is in device memory: read it from the arrivals, by wait_total() or as the array "
      "total");
}

std::int64_t rows_touched(const PyPlan& plan) {
  const bool known = is_host(plan.device) || plan.known_total >= 0;
  if (known) return std::min(plan.total(), plan.shape.capacity);
  return plan.most_rows >= 0 ? plan.most_rows : plan.shape.capacity;
}

void bind_plan(nb::module_& module) {
  nb::class_<PyPlan>(module, "Plan",
                     R"(All that follows from ids and placement: destinations, rows, counts, drops.

It serves any number of dispatches and combines of exchanges that agree on placement and sizes, in any format. The plan
of a call lies in the lane's memory until the lane's next dispatch: copy() it to keep it longer. Its tables are arrays
of the call's framework, on the exchange's device.)")
      .def_ro("tokens", &PyPlan::tokens, "N of this rank")
      .def_prop_ro(
          "total", &PyPlan::total,
          "Rows on this rank, padding between groups included. On devices only after the host has read it.")
      .def_prop_ro(
          "counts",
          [](const PyPlan& self) {
            return table(self, &PlanView::counts, {self.shape.ranks, self.shape.experts});
          },
          "int32 [R, E]: routes of every rank to every expert, drops included.")
      .def_prop_ro(
          "tokens_between",
          [](const PyPlan& self) {
            return table(self, &PlanView::tokens_between, {self.shape.ranks, self.shape.ranks});
          },
          "int32 [R, R]: tokens that rank s sends to rank d.")
      .def_prop_ro(
          "destinations",
          [](const PyPlan& self) {
            return table(self, &PlanView::route_rank, {self.tokens, self.shape.top_k});
          },
          "int32 [N, K]: the rank of a route's expert, -1 for masked slots.")
      .def_prop_ro(
          "rows",
          [](const PyPlan& self) {
            return table(self, &PlanView::route_row, {self.tokens, self.shape.top_k});
          },
          "int32 [N, K]: a route's row there, -1 if masked or dropped.")
      .def_prop_ro(
          "sources",
          [](const PyPlan& self) {
            const PlanView view = view_plan(self.usable().storage(), self.shape);
            return view_of(self.framework, view.sources, kInt32, {self.shape.capacity, 3}, {}, self.device,
                           self.owner);
          },
          "int32 [most rows, 3]: rank, token and slot of every row here, as far as there are rows.")
      .def_prop_ro("storage", &storage,
                   "uint8 [bytes]: the plan itself, without pointers: to be kept, and brought back by\n"
                   "Exchange.plan_over().")
      .def(
          "vouch",
          [](PyPlan& self, std::int64_t rows) {
            if (rows < 0) throw UsageError(str("rows = ", rows, ", must be 0 or more"));
            self.most_rows = rows;
          },
          nb::arg("rows"),
          "The caller's word that the plan's total is at most this, so that arrays of that many rows are "
          "taken where\n"
          "only the device knows the total. If it is more, rows past their end are read.")
      .def("copy", &copy, "A plan of its own, independent of the lane's next dispatch.")
      .def("__repr__", [](const PyPlan& self) {
        return str("Plan(", self.tokens, " tokens, ", self.shape.ranks, " ranks, ", self.shape.experts,
                   " experts)");
      });
}

}  // namespace ferry::python
