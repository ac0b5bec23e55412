#include "host_parts.hpp"

#include <array>

#include "bindings.hpp"

namespace ferry::python {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

constexpr std::array<const char*, kHostParts> kNames = {"reading arguments",   "allocation",
                                                        "streams and events",  "waiting for counts",
                                                        "exchange and launch", "handle and results"};

thread_local PartTimer* innermost = nullptr;
std::array<std::chrono::steady_clock::duration, kHostParts> total{};

void measure(bool on) {
  if (on) total = {};
  PartTimer::measuring = on;
}

nb::dict measured() {
  nb::dict seconds;
  for (int part = 0; part < kHostParts; ++part) {
    const auto i = static_cast<std::size_t>(part);
    seconds[kNames[i]] = std::chrono::duration<double>(total[i]).count();
  }
  return seconds;
}

}  // namespace

void PartTimer::begin(HostPart part) {
  began_ = true;
  part_ = part;
  outer_ = innermost;
  innermost = this;
  start_ = Clock::now();
}

void PartTimer::end() {
  const Clock::duration time = Clock::now() - start_;
  total[static_cast<std::size_t>(part_)] += time - inside_;
  innermost = outer_;
  if (outer_ != nullptr) outer_->inside_ += time;
}

void bind_host_parts(nb::module_& module) {
  module.def("_measure_parts", &measure, "on"_a, "Starts or ends the measurement of the parts of calls.");
  module.def("_measured_parts", &measured, "Seconds of each part since the measurement began.",
             nb::sig("def _measured_parts() -> dict[str, float]"));
}

}  // namespace ferry::python
