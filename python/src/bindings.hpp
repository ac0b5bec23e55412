// Functions that bind the classes and functions of the module, one for each source file.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include "base/text.hpp"
#include "casters.hpp"

namespace ferry::python {

// copy.copy() and copy.deepcopy() of what holds such an object, as a module does, share the object: a copy
// with a state of its own would lose count of the calls. `name`: of the class.
template <class T>
void share_between_copies(nanobind::class_<T>& type, const std::string& name) {
  namespace nb = nanobind;
  type.def(
      "__copy__", [](const nb::object& self) { return self; }, "Returns the object itself.",
      nb::sig(str("def __copy__(self) -> ", name).c_str()));
  type.def(
      "__deepcopy__", [](const nb::object& self, const nb::object&) { return self; }, nb::arg("memo").none(),
      "Returns the object itself.",
      nb::sig(str("def __deepcopy__(self, memo: typing.Any) -> ", name).c_str()));
  type.def(
      "__reduce_ex__",
      [name](const nb::object&, const nb::object&) -> nb::object {
        throw nb::type_error(
            str("cannot pickle a ferry.", name,
                ", which belongs to its process: make a group and what it needs in the other process")
                .c_str());
      },
      nb::arg("protocol"),
      nb::sig("def __reduce_ex__(self, protocol: typing.SupportsIndex, /) -> typing.NoReturn"));
}

// An argument that is passed by position and may be None.
template <class>
auto unnamed() {
  return nanobind::arg().none();
}

// Defines a function for the package's own code in Python, which passes all arguments by position.
template <class Returned, class... Given>
void define_unnamed(nanobind::module_& module, const char* name, Returned (*function)(Given...),
                    const char* doc) {
  module.def(name, function, unnamed<Given>()..., doc);
}

template <std::size_t>
using UnreadArgument = const nanobind::object&;

// Defines a method for the package's own code in Python, which passes all arguments by position. They arrive
// unread, as the members of `Given`, a struct of references to objects.
template <class Class, class Given>
void define_unread(nanobind::class_<Class>& type, const char* name,
                   nanobind::tuple (Class::*method)(const Given&)) {
  const auto define = [&]<std::size_t... I>(std::index_sequence<I...>) {
// Members of `Given` may be such structs themselves.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmissing-braces"
    type.def(
        name, [method](Class& self, UnreadArgument<I>... given) { return (self.*method)(Given{given...}); },
        unnamed<UnreadArgument<I>>()...);
#pragma GCC diagnostic pop
  };
  define(std::make_index_sequence<sizeof(Given) / sizeof(void*)>());
}

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
