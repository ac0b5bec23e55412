#include "bindings.hpp"
#include "device.hpp"
#include "errors.hpp"
#include "ferry/types.hpp"
#include "ferry/version.hpp"
#include "interrupt.hpp"

NB_MODULE(_core, module) {
  using namespace ferry::python;
  namespace nb = nanobind;

  // Exchanges that a program holds to its end are no mistake of its own.
  nb::set_leak_warnings(false);
  module.doc() = "The compiled part of ferry; import ferry instead.";
  const std::string_view version = ferry::version();
  module.attr("__version__") = nb::str(version.data(), version.size());
  module.attr("MAX_TOP_K") = ferry::kMaxTopK;
  module.attr("MAX_PARTS") = ferry::kMaxParts;
  module.def("has_cuda", has_cuda,
             "Whether this build has the backend for GPUs. It says nothing about the machine.");

  register_errors();
  heed_signals();
  bind_config(module);
  bind_group(module);
  bind_plan(module);
  bind_dispatch_result(module);
  bind_exchange(module);
  bind_operators(module);
  bind_trace(module);
}
