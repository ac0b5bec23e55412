// Functions that bind the classes and functions of the module, one for each source file.
#pragma once

#include "casters.hpp"

namespace ferry::python {

void bind_placement(nanobind::module_& module);
void bind_config(nanobind::module_& module);
void bind_formats(nanobind::module_& module);
void bind_group(nanobind::module_& module);
void bind_plan(nanobind::module_& module);
void bind_dispatch_layout(nanobind::module_& module);
void bind_dispatch_result(nanobind::module_& module);
void bind_exchange(nanobind::module_& module);
void bind_program(nanobind::module_& module);
void bind_operators(nanobind::module_& module);
void bind_max(nanobind::module_& module);
void bind_trace(nanobind::module_& module);
void bind_deep_ep_streams(nanobind::module_& module);
void bind_low_latency(nanobind::module_& module);
void bind_normal(nanobind::module_& module);
void bind_host_parts(nanobind::module_& module);
void bind_misfits(nanobind::module_& module);

// After all of these.
void publish_signatures(nanobind::module_& module);

}  // namespace ferry::python
