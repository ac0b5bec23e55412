// What dispatch returns, as Python sees it: arrays are made when they are asked for.
#pragma once

#include <array>

#include "ferry/exchange.hpp"
#include "plan.hpp"

namespace ferry::python {

// Memory for arrivals that the caller brings.
struct PyMemory {
  nb::object parts = nb::none();  // an array, or a tuple of one for each part
  nb::object weight = nb::none(), local_ids = nb::none(), group_of_row = nb::none(), plan = nb::none();
  nb::object counts = nb::none(), row_offsets = nb::none(), dots = nb::none();
};

// What is known of a dispatch before it has returned, and needed to show its arrivals.
struct DispatchContext {
  Framework framework = Framework::numpy;
  Device device = kHost;
  Format format;
  std::array<Element, kMaxParts> elements{};  // of the parts on arrival
  PyMemory memory;
  nb::object plan = nb::none();  // of a dispatch by plan
  std::int64_t tokens = 0;
  int lane = 0;
};

struct PyDispatchResult {
  DispatchResult received;
  DispatchContext context;
  SharedState state;
  nb::object keeper;  // of the lane's memory
  nb::object plan{};  // a PyPlan
  std::array<nb::object, kMaxParts> parts{};
};

}  // namespace ferry::python
