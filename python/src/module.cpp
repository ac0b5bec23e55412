#include "bindings.hpp"
#include "device.hpp"
#include "errors.hpp"
#include "ferry/types.hpp"
#include "ferry/version.hpp"
#include "interpreter.hpp"
#include "interrupt.hpp"

NB_MODULE(_core, module) {
  using namespace ferry::python;
  namespace nb = nanobind;

  // A program may hold an exchange until the interpreter exits, which nanobind would report as a leak.
  nb::set_leak_warnings(false);
  module.doc() = "The compiled part of ferry. Import ferry instead.";
  const std::string_view version = ferry::version();
  module.attr("__version__") = nb::str(version.data(), version.size());
  module.attr("MAX_TOP_K") = ferry::kMaxTopK;
  module.attr("MAX_PARTS") = ferry::kMaxParts;
  module.def("has_cuda", has_cuda,
             "Whether this build has the CUDA backend. It does not tell whether the machine has a GPU.");

  register_errors(module);
  watch_for_end_of_python();
  install_signal_handling();
  bind_placement(module);
  bind_config(module);
  bind_formats(module);
  bind_group(module);
  bind_plan(module);
  bind_dispatch_layout(module);
  bind_dispatch_result(module);
  bind_exchange(module);
  bind_program(module);
  bind_operators(module);
  bind_max(module);
  bind_trace(module);
  bind_deep_ep_streams(module);
  bind_low_latency(module);
  bind_normal(module);
  bind_host_parts(module);
  bind_misfits(module);
  publish_signatures(module);
}
