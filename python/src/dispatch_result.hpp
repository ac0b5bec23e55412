// The Python classes DispatchResult and ReceiveBuffers. Arrays are created on first access.
#pragma once

#include <array>

#include "ferry/exchange.hpp"
#include "format/parts.hpp"
#include "plan.hpp"

namespace ferry::python {

// The caller's memory for the result of a dispatch; None: the lane's own memory.
struct PyReceiveBuffers {
  nb::object parts = nb::none();  // an array, or a tuple of one array a part
  nb::object weight = nb::none(), local_ids = nb::none(), group_of_row = nb::none(), plan = nb::none();
  nb::object counts = nb::none(), row_offsets = nb::none(), dots = nb::none();
  std::int64_t rows = 0;
  bool allow_truncation = false;
  nb::object count_sums = nb::none();
};

// Known when a dispatch starts; its result needs it to create arrays.
struct DispatchContext {
  Framework framework = Framework::numpy;
  Device device = kHost;
  Format format;
  PartList parts{};                           // of received rows
  std::array<Element, kMaxParts> elements{};  // element types of the received parts
  PyReceiveBuffers memory;
  nb::object plan = nb::none();  // the PyPlan given in place of ids
  std::int64_t tokens = 0;       // N
  int lane = 0;
};

struct PyDispatchResult {
  DispatchResult received;
  DispatchContext context;
  SharedState state;
  nb::object state_owner;  // keeps the lane's memory alive
  nb::object plan{};       // a PyPlan
  std::array<nb::object, kMaxParts> parts{};
  nb::object weight{}, counts{}, row_offsets{};  // once read
};

}  // namespace ferry::python
