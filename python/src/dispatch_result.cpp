#include "dispatch_result.hpp"
#include "casters.hpp"

#include <atomic>
#include <chrono>
#include <thread>

#include "base/text.hpp"
#include "bindings.hpp"
#include "exchange/configuration.hpp"
#include "ferry/error.hpp"
#include "format/parts.hpp"
#include "interpreter.hpp"

namespace ferry::python {

using namespace nb::literals;

namespace {

const Config& exchange_config(const PyDispatchResult& self) {
  return self.state->exchange.config();
}

std::int64_t row_count(const PyDispatchResult& self) {
  const std::int64_t capacity = row_capacity(exchange_config(self), self.state->exchange.rank().index());
  const std::int64_t rows = self.context.memory.rows;
  return rows > 0 && self.context.plan.is_none() ? std::min(rows, capacity) : capacity;
}

// Rows of the parts: of expert_indexed one for each token of every rank.
std::int64_t part_rows(const PyDispatchResult& self) {
  return self.received.row_total != nullptr ? self.received.row_capacity : row_count(self);
}

// A view of the lane's own memory.
nb::object lane_view(const PyDispatchResult& self, const void* data, Element element, const Shape& shape) {
  if (data == nullptr) return nb::none();
  return view_of(self.context.framework, const_cast<void*>(data), element, shape, {}, self.context.device,
                 self.state_owner);
}

// A view of the array's memory: the caller's `given`, or if that is None the lane's own.
nb::object view(const PyDispatchResult& self, const nb::object& given, const void* data, Element element,
                const Shape& shape) {
  if (data == nullptr) return nb::none();
  return view_of(self.context.framework, const_cast<void*>(data), element, shape, {}, self.context.device,
                 given.is_none() ? self.state_owner : given);
}

// [G]; empty, not None, on a rank without groups, whose address may be null.
nb::object groups_view(const PyDispatchResult& self, const nb::object& given, const std::int32_t* data) {
  static constexpr std::int32_t kNone = 0;
  return view(self, given, self.received.groups == 0 ? &kNone : data, kInt32, {self.received.groups});
}

// expert_indexed: a number for each position.
nb::object positions_view(const PyDispatchResult& self, const std::int32_t* data) {
  return lane_view(self, data, kInt32, {row_count(self)});
}

// [rows, columns]; expert_padded [experts, capacity, columns].
Shape rows_shape(const PyDispatchResult& self, std::int64_t columns) {
  if (exchange_config(self).layout != Layout::expert_padded) return {part_rows(self), columns};
  return {self.received.groups, self.received.capacity, columns};
}

// [rows of tiles, tiles of a row, 32, 4, 4].
Shape tiles_shape(const PyDispatchResult& self, const PartLayout& layout) {
  const std::int64_t capacity = row_capacity(exchange_config(self), self.state->exchange.rank().index());
  return {row_tiles(capacity) + self.received.groups, elements_of(layout), 32, 4, 4};
}

// `columns`: elements of a row.
Shape column_strides(const PyDispatchResult& self, std::int64_t columns, std::int64_t leading) {
  if (exchange_config(self).layout != Layout::expert_padded) return {1, leading};
  return {columns * leading, 1, leading};
}

nb::object part(PyDispatchResult& self, std::size_t index) {
  nb::object& cached = self.parts[index];
  if (cached.is_valid()) return cached;
  const PartLayout layout = self.context.parts.part[index];
  const ReceivedPart& received = self.received.parts[index];
  const Element element = self.context.elements[index];
  const nb::object& given = self.context.memory.parts;
  const nb::object buffer = nb::isinstance<nb::tuple>(given) ? nb::object(given[index]) : given;
  if (!given.is_none() && !layout.columns) return cached = buffer;
  const nb::object& owner = given.is_none() ? self.state_owner : buffer;
  const Shape shape =
      layout.tiles ? tiles_shape(self, layout) : rows_shape(self, layout.row_bytes * 8 / element.bits);
  const Shape strides =
      layout.columns ? column_strides(self, shape.back(), received.leading_dimension) : Shape{};
  cached =
      view_of(self.context.framework, received.data, element, shape, strides, self.context.device, owner);
  return cached;
}

nb::object all_parts(PyDispatchResult& self) {
  const int count = self.context.parts.count;
  nb::list parts;
  for (int p = 0; p < count; ++p) parts.append(part(self, static_cast<std::size_t>(p)));
  return nb::tuple(parts);
}

nb::object scales(PyDispatchResult& self) {
  if (!self.context.format.quantises() || self.context.parts.count < 2) return nb::none();
  return part(self, 1);
}

// One weight a row; rank_major: one for each of its slots.
Shape weights_shape(const PyDispatchResult& self) {
  if (exchange_config(self).layout == Layout::rank_major)
    return {row_count(self), exchange_config(self).top_k};
  return {row_count(self)};
}

// The total is the last element of row_offsets.
nb::object total_of(const PyDispatchResult& self) {
  if (is_host(self.context.device)) return nb::int_(*self.received.total);
  return view(self, self.context.memory.row_offsets, self.received.total, kInt32, {});
}

// The total that the call writes to pinned host memory, together with its call number.
std::int64_t total_from_host_memory(const PyDispatchResult& self) {
  const HostTotals* host = self.received.host;
  const std::uint64_t call = self.received.call;
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::duration<double>(exchange_config(self).deadline);
  // Acquire: the call writes the total before its number, so a thread that reads the
  // number may read the total.
  const auto written_call = [host] {
    return std::atomic_ref(const_cast<std::uint64_t&>(host->call)).load(std::memory_order_acquire);
  };
  {
    const GilRelease unlocked;
    while (written_call() < call && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  }
  if (written_call() == call) return host->total;
  self.state->exchange.check(self.context.lane);
  throw UsageError(str("wait_total: the total of call ", call,
                       " is not available: the last one written is of call ", written_call()));
}

std::int64_t wait_total(PyDispatchResult& self) {
  auto& plan = nb::cast<PyPlan&>(self.plan);
  // Once the exchange was captured into a graph, replays advance the lane's call number without the host, so
  // the number of this call is unknown. Then read the array, which waits for the stream.
  const bool number_known = is_host(self.context.device) || !self.state->captured;
  const std::int64_t total =
      number_known ? total_from_host_memory(self) : nb::cast<std::int64_t>(nb::int_(total_of(self)));
  // Plans of experts in slices are those of the routes before the gather.
  (exchange_config(self).placement.tp() > 1 ? plan.gathered_total : plan.known_total) = total;
  return total;
}

nb::object received_rows(PyDispatchResult& self) {
  if (exchange_config(self).layout == Layout::expert_padded) {
    throw UsageError(
        "received_rows: with expert_padded the rows of each expert start at a row of their own; use "
        "data[group]"
        "[:counts[group]]");
  }
  const std::int64_t total = wait_total(self);
  const std::int64_t rows =
      self.received.row_total != nullptr ? *self.received.row_total : std::min(total, row_count(self));
  return part(self, 0)[nb::slice(nb::int_(0), nb::int_(rows), nb::none())];
}

void bind_receive_buffers(nb::module_& module) {
  nb::class_<PyReceiveBuffers>(module, "ReceiveBuffers", R"(The caller's memory for the result of a dispatch.

parts          an array, or a tuple with one for each part of the format: capacity rows, or for a dispatch by a plan as
               many as the plan's total; expert_indexed: R*T rows; scales in columns: rows rounded up to a multiple of 4, expert_padded those of
               each group; as tiles: ceil(rows / 128) + G rows of tiles. C-contiguous, or scales in columns with the shape
               and strides of a result's own. DispatchResult.parts then returns these arrays
weight         float32 [capacity]; rank_major [capacity, K]
local_ids      int32 [capacity, K], rank_major only
group_of_row   int32 [capacity]: the group of every row, -1 on padding; written only if given
plan           uint8 [plan_bytes(config, ranks)]
counts         int32 [G]
row_offsets    int32 [G + 1]; its last element is the total
dots           float32 [capacity], for a dispatch with dot_rows
count_sums     int32 [G]: the call adds its counts to it

rows           rows that these arrays have room for, instead of the capacity, in a dispatch from ids: such as
               Exchange.dispatch_counts() tells. If more arrive, those past it are not stored, and every rank gets an
               OverflowError. Not with expert_padded, expert_indexed, scales in columns or tiles, or dot_rows
allow_truncation  more than `rows` rows on this rank are no error

Arrays may be longer along their first dimension. Whatever is None is written to the lane's own memory, which the lane's
next dispatch overwrites.)")
      .def(
          "__init__",
          [](PyReceiveBuffers* self, nb::object parts, nb::object weight, nb::object local_ids,
             nb::object group_of_row, nb::object plan, nb::object counts, nb::object row_offsets,
             nb::object dots, nb::object count_sums, std::int64_t rows, bool allow_truncation) {
            new (self) PyReceiveBuffers{std::move(parts),        std::move(weight),    std::move(local_ids),
                                        std::move(group_of_row), std::move(plan),      std::move(counts),
                                        std::move(row_offsets),  std::move(dots),      rows,
                                        allow_truncation,        std::move(count_sums)};
          },
          "parts"_a = nb::none(), nb::kw_only(), "weight"_a = nb::none(), "local_ids"_a = nb::none(),
          "group_of_row"_a = nb::none(), "plan"_a = nb::none(), "counts"_a = nb::none(),
          "row_offsets"_a = nb::none(), "dots"_a = nb::none(), "count_sums"_a = nb::none(), "rows"_a = 0,
          "allow_truncation"_a = false);
}

}  // namespace

void bind_dispatch_result(nb::module_& module) {
  bind_receive_buffers(module);
  nb::class_<PyDispatchResult>(module, "DispatchResult",
                               R"(The received rows, grouped by expert, as arrays of the call's framework.

Groups are the shared experts, then this rank's experts in local order; for rank_major they are the source ranks. Arrays are as long as the
exchange's capacity; rows past the total are undefined. The arrays are the lane's memory, which its next dispatch
overwrites, unless ReceiveBuffers were given.)")
      .def_prop_ro(
          "data", [](PyDispatchResult& self) { return part(self, 0); },
          "[capacity, H]; expert_padded [G, capacity, H]; expert_indexed [R*T, H]: the rows' values.")
      .def_prop_ro(
          "scales", &scales,
          "fp8, mxfp8, mxfp4, nvfp4: the scales of each row's blocks, [capacity, n]; expert_padded [G, "
          "capacity, n]; in columns with strides (1, A) or (n * A, 1, A), A = capacity rounded up to a "
          "multiple of 4; as tiles [rows of tiles, tiles, 32, 4, 4], see tile_offsets; else None. n: a row's "
          "blocks; of formats other than fp8 rounded up to a multiple of 4, or in columns int32 words of "
          "four; packed fp8: int32 words of four.")
      .def_prop_ro(
          "tile_offsets",
          [](const PyDispatchResult& self) {
            return lane_view(self, self.received.tile_offsets, kInt32, {self.received.groups + 1});
          },
          "Scales as tiles: int32 [G + 1], the first row of tiles of each group in `scales`; else None.")
      .def_prop_ro("parts", &all_parts,
                   "Tuple of all parts: (values,), (values, scales), with nvfp4-token also the rows' scales, "
                   "or the raw parts.")
      .def_prop_ro(
          "counts",
          [](PyDispatchResult& self) {
            if (self.counts.is_valid()) return self.counts;
            return self.counts = groups_view(self, self.context.memory.counts, self.received.counts);
          },
          "int32 [G]: rows of each group, padding not counted.")
      .def_prop_ro(
          "row_offsets",
          [](PyDispatchResult& self) {
            if (self.row_offsets.is_valid()) return self.row_offsets;
            return self.row_offsets = view(self, self.context.memory.row_offsets, self.received.row_offsets,
                                           kInt32, {self.received.groups + 1});
          },
          "int32 [G + 1]: first row of each group; the last element is the total.")
      .def_prop_ro("total", &total_of,
                   "row_offsets[G]: an int on host memory; on devices int32 [], for which int(total) waits.")
      .def_prop_ro(
          "group_expert",
          [](const PyDispatchResult& self) {
            return groups_view(self, nb::none(), self.received.group_expert);
          },
          "int32 [G]: global expert id of each group, E + s for shared expert s; -1 for rank_major.")
      .def_prop_ro(
          "source",
          [](const PyDispatchResult& self) {
            if (self.received.row_total != nullptr)
              return lane_view(self, self.received.source, kInt32, {self.received.row_capacity, 3});
            return view(self, nb::cast<PyPlan&>(self.plan).owner, self.received.source, kInt32,
                        {row_count(self), 3});
          },
          "int32 [capacity, 3]: source rank, token and slot of each row; -1 on padding. expert_indexed: "
          "[R*T, 3], slot -1.")
      .def_prop_ro(
          "index", [](const PyDispatchResult& self) { return positions_view(self, self.received.index); },
          "expert_indexed: int32 [capacity], the row of `data` that each position holds; len(data) on "
          "padding. Else None.")
      .def_prop_ro(
          "slot", [](const PyDispatchResult& self) { return positions_view(self, self.received.slot); },
          "expert_indexed: int32 [capacity], the slot of each position at its source, K + s of shared expert "
          "s; -1 on padding. Else None.")
      .def_prop_ro(
          "block_group",
          [](const PyDispatchResult& self) {
            return lane_view(self, self.received.block_group, kInt32,
                             {row_count(self) / exchange_config(self).alignment});
          },
          "expert_indexed: int32 [capacity / alignment], the group of each block of `alignment` positions; "
          "-1 from the total on. Else None.")
      .def_prop_ro(
          "source_offsets",
          [](const PyDispatchResult& self) {
            return lane_view(self, self.received.source_offsets, kInt32,
                             {exchange_config(self).placement.ranks() + 1});
          },
          "expert_indexed: int32 [R + 1], the first row of each source rank; the last element is the number "
          "of rows. Else None.")
      .def_prop_ro(
          "weight",
          [](PyDispatchResult& self) {
            if (self.weight.is_valid()) return self.weight;
            return self.weight = view(self, self.context.memory.weight, self.received.weight, kFp32,
                                      weights_shape(self));
          },
          "float32 [capacity], rank_major [capacity, K]: each row's router weight; None without weights.")
      .def_prop_ro(
          "local_ids",
          [](const PyDispatchResult& self) {
            return view(self, self.context.memory.local_ids, self.received.local_ids, kInt32,
                        weights_shape(self));
          },
          "rank_major: int32 [capacity, K], the local expert of each slot, or -1; else None.")
      .def_prop_ro(
          "group_of_row",
          [](const PyDispatchResult& self) {
            return view(self, self.context.memory.group_of_row, self.received.group_of_row, kInt32,
                        {row_count(self)});
          },
          "int32 [capacity], the group of each row, if ReceiveBuffers.group_of_row was given; else None.")
      .def_prop_ro(
          "dots",
          [](const PyDispatchResult& self) {
            return view(self, self.context.memory.dots, self.received.dots, kFp32, {row_count(self)});
          },
          "float32 [capacity], dot(token, dot_rows[row]), if dot_rows was given; else None.")
      .def_ro("plan", &PyDispatchResult::plan, "The Plan of the call: give it to combine.")
      .def_prop_ro(
          "groups", [](const PyDispatchResult& self) { return self.received.groups; },
          "G, the number of groups.")
      .def_prop_ro(
          "capacity", [](const PyDispatchResult& self) { return self.received.capacity; },
          "Rows there is room for; expert_padded: rows of one expert.")
      .def_prop_ro(
          "call", [](const PyDispatchResult& self) { return self.received.call; }, "Call number on the lane.")
      .def("wait_total", &wait_total,
           R"(Returns the total as an int.

With 'cuda' it waits, `deadline` seconds at most, until the call has written the total to pinned memory. The call does
that while rows may still be on their way, so this is sooner than int(total).)")
      .def("received_rows", &received_rows,
           R"([total, H]: the rows of `data` that the call has received, padding between groups included.

Waits as wait_total() does. expert_indexed: all its rows, of which none is padding. Not with expert_padded.)",
           nb::sig("def received_rows(self) -> typing.Any"))
      .def("__repr__", [](const PyDispatchResult& self) {
        return str("DispatchResult(call ", self.received.call, ", ", self.received.groups,
                   " groups, capacity ", self.received.capacity, ", format='", to_string(self.context.format),
                   "')");
      });
}

}  // namespace ferry::python
