#include "dispatch_result.hpp"

#include <nanobind/stl/string.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "base/text.hpp"
#include "bindings.hpp"
#include "exchange/configuration.hpp"
#include "ferry/error.hpp"
#include "format/parts.hpp"

namespace ferry::python {

using namespace nb::literals;

namespace {

const Config& config_of(const PyDispatchResult& self) {
  return self.state->exchange.config();
}

std::int64_t all_rows(const PyDispatchResult& self) {
  return row_capacity(config_of(self), self.state->exchange.rank().index());
}

nb::object in_lane(const PyDispatchResult& self, const void* data, Element element, const Shape& shape) {
  if (data == nullptr) return nb::none();
  return view_of(self.context.framework, const_cast<void*>(data), element, shape, {}, self.context.device,
                 self.keeper);
}

nb::object in(const PyDispatchResult& self, const nb::object& given, const void* data, Element element,
              const Shape& shape) {
  if (data == nullptr) return nb::none();
  return view_of(self.context.framework, const_cast<void*>(data), element, shape, {}, self.context.device,
                 given.is_none() ? self.keeper : given);
}

// Rows first: [rows, row], or in the padded layout [experts, capacity, row].
Shape shape_of_rows(const PyDispatchResult& self, std::int64_t row) {
  if (config_of(self).layout != Layout::expert_padded) return {all_rows(self), row};
  return {self.received.groups, self.received.capacity, row};
}

Shape strides_of_columns(const PyDispatchResult& self, std::int64_t leading) {
  if (config_of(self).layout != Layout::expert_padded) return {1, leading};
  return {self.received.capacity, 1, leading};
}

nb::object part(PyDispatchResult& self, std::size_t index) {
  nb::object& made = self.parts[index];
  if (made.is_valid()) return made;
  const PartLayout layout = parts_of(self.context.format, config_of(self).hidden).part[index];
  const ReceivedPart& arrived = self.received.parts[index];
  const Element element = self.context.elements[index];
  const nb::object& given = self.context.memory.parts;
  const nb::object own = nb::isinstance<nb::tuple>(given) ? nb::object(given[index]) : given;
  if (!given.is_none() && !layout.columns) return made = own;
  const nb::object& owner = given.is_none() ? self.keeper : own;
  const Shape shape = shape_of_rows(self, layout.row_bytes * 8 / element.bits);
  const Shape strides = layout.columns ? strides_of_columns(self, arrived.leading_dimension) : Shape{};
  made = view_of(self.context.framework, arrived.data, element, shape, strides, self.context.device, owner);
  return made;
}

nb::object all_parts(PyDispatchResult& self) {
  const int count = parts_of(self.context.format, config_of(self).hidden).count;
  nb::list parts;
  for (int p = 0; p < count; ++p) parts.append(part(self, static_cast<std::size_t>(p)));
  return nb::tuple(parts);
}

nb::object scales(PyDispatchResult& self) {
  if (self.context.format.kind != FormatKind::fp8_e4m3) return nb::none();
  return part(self, 1);
}

// One for each row; rank_major: one for each slot of it.
Shape shape_of_weights(const PyDispatchResult& self) {
  if (config_of(self).layout == Layout::rank_major) return {all_rows(self), config_of(self).top_k};
  return {all_rows(self)};
}

// It lies among the row offsets.
nb::object total_array(const PyDispatchResult& self) {
  return in(self, self.context.memory.row_offsets, self.received.total, kInt32, {});
}

// The total that the call itself writes to pinned memory, with its number.
std::int64_t total_on_host(const PyDispatchResult& self) {
  const HostTotals* host = self.received.host;
  const std::uint64_t call = self.received.call;
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(config_of(self).deadline);
  // Acquire: whoever sees the number may read the total.
  const auto seen = [host] {
    return std::atomic_ref(const_cast<std::uint64_t&>(host->call)).load(std::memory_order_acquire);
  };
  {
    const nb::gil_scoped_release unlocked;
    while (seen() < call && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  }
  if (seen() == call) return host->total;
  self.state->exchange.check(self.context.lane);
  throw UsageError(
      str("wait_total: the total of call ", call, " is not there, the last one seen is of call ", seen()));
}

std::int64_t wait_total(PyDispatchResult& self) {
  auto& plan = nb::cast<PyPlan&>(self.plan);
  // Replays take call numbers that no eager call knows of: then the array says it, which waits for the
  // stream.
  const bool numbered = is_host(self.context.device) || !self.state->captured;
  plan.known_total = numbered ? total_on_host(self) : nb::cast<std::int64_t>(nb::int_(total_array(self)));
  return plan.known_total;
}

void bind_memory(nb::module_& module) {
  nb::class_<PyMemory>(module, "ReceiveBuffers", R"(Memory of the caller for what dispatch returns.

parts          an array, or a tuple of one for each part of the format: capacity rows, for a dispatch by a plan its
               total suffices. They are what the arrivals then hand out
weight         float32 [capacity]; rank_major [capacity, K]
local_ids      int32 [capacity, K], rank_major
group_of_row   int32 [capacity]: the group of every row, -1 on padding; written only if given
plan           uint8 [plan_bytes(config, ranks)]
counts         int32 [G]
row_offsets    int32 [G + 1], and so the total
dots           float32 [capacity], for a dispatch with dot_rows

What is not given lies in the lane's memory, which its next dispatch overwrites.)")
      .def(
          "__init__",
          [](PyMemory* self, nb::object parts, nb::object weight, nb::object local_ids,
             nb::object group_of_row, nb::object plan, nb::object counts, nb::object row_offsets,
             nb::object dots) {
            new (self)
                PyMemory{std::move(parts), std::move(weight), std::move(local_ids),   std::move(group_of_row),
                         std::move(plan),  std::move(counts), std::move(row_offsets), std::move(dots)};
          },
          "parts"_a = nb::none(), nb::kw_only(), "weight"_a = nb::none(), "local_ids"_a = nb::none(),
          "group_of_row"_a = nb::none(), "plan"_a = nb::none(), "counts"_a = nb::none(),
          "row_offsets"_a = nb::none(), "dots"_a = nb::none());
}

}  // namespace

void bind_dispatch_result(nb::module_& module) {
  bind_memory(module);
  nb::class_<PyDispatchResult>(module, "DispatchResult",
                               R"(What dispatch returns: arrays of the framework that went in.

Groups are this rank's experts in local order; for rank_major the source ranks. Arrays have room for all rows there may
be; rows past the total are never written or read. They lie in the lane's memory until its next dispatch, unless
memory was given.)")
      .def_prop_ro(
          "data", [](PyDispatchResult& self) { return part(self, 0); },
          "[capacity, H], or [L, capacity, H] in the padded layout: the rows.")
      .def_prop_ro("scales", &scales, "fp8: the scales of every row's blocks, [capacity, blocks]; else None.")
      .def_prop_ro("parts", &all_parts, "tuple of all parts: values, scales, or the raw ones.")
      .def_prop_ro(
          "counts",
          [](const PyDispatchResult& self) {
            return in(self, self.context.memory.counts, self.received.counts, kInt32, {self.received.groups});
          },
          "int32 [G]: rows of a group, padding not counted.")
      .def_prop_ro(
          "row_offsets",
          [](const PyDispatchResult& self) {
            return in(self, self.context.memory.row_offsets, self.received.row_offsets, kInt32,
                      {self.received.groups + 1});
          },
          "int32 [G + 1]: first row of a group.")
      .def_prop_ro("total", &total_array,
                   "int32 []: row_offsets[G]. int(total) waits for the device, if there is one.")
      .def_prop_ro(
          "group_expert",
          [](const PyDispatchResult& self) {
            return in_lane(self, self.received.group_expert, kInt32, {self.received.groups});
          },
          "int32 [G]: global id of a group's expert; -1 for rank_major.")
      .def_prop_ro(
          "source",
          [](const PyDispatchResult& self) {
            return in(self, nb::cast<PyPlan&>(self.plan).owner, self.received.source, kInt32,
                      {all_rows(self), 3});
          },
          "int32 [capacity, 3]: rank, token and slot of every row; -1 on padding.")
      .def_prop_ro(
          "weight",
          [](const PyDispatchResult& self) {
            return in(self, self.context.memory.weight, self.received.weight, kFp32, shape_of_weights(self));
          },
          "float32 [capacity], rank_major [capacity, K]: the weights that travelled; None without.")
      .def_prop_ro(
          "local_ids",
          [](const PyDispatchResult& self) {
            return in(self, self.context.memory.local_ids, self.received.local_ids, kInt32,
                      shape_of_weights(self));
          },
          "rank_major: int32 [capacity, K]: local expert of every slot, or -1.")
      .def_prop_ro(
          "group_of_row",
          [](const PyDispatchResult& self) {
            return in(self, self.context.memory.group_of_row, self.received.group_of_row, kInt32,
                      {all_rows(self)});
          },
          "int32 [capacity] if memory was given for it.")
      .def_prop_ro(
          "dots",
          [](const PyDispatchResult& self) {
            return in(self, self.context.memory.dots, self.received.dots, kFp32, {all_rows(self)});
          },
          "float32 [capacity] if dot_rows was given.")
      .def_ro("plan", &PyDispatchResult::plan, "the Plan of the call")
      .def_prop_ro(
          "groups", [](const PyDispatchResult& self) { return self.received.groups; }, "G")
      .def_prop_ro(
          "capacity", [](const PyDispatchResult& self) { return self.received.capacity; },
          "rows there is room for; padded layout: rows an expert")
      .def_prop_ro(
          "call", [](const PyDispatchResult& self) { return self.received.call; }, "call number on the lane")
      .def("wait_total", &wait_total,
           "The total as a number. On devices it waits for the call's own word in pinned memory, which comes "
           "while\n"
           "rows may still be arriving, and at most as long as the exchange's deadline.")
      .def("__repr__", [](const PyDispatchResult& self) {
        return str("DispatchResult(call ", self.received.call, ", ", self.received.groups,
                   " groups, capacity ", self.received.capacity, ", format='", to_string(self.context.format),
                   "')");
      });
}

}  // namespace ferry::python
