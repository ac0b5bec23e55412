// Makes inspect.signature() work for the functions and classes of the module.
#include "bindings.hpp"
#include "call_binding.hpp"

namespace ferry::python {
namespace {

// nanobind's function types are immutable from Python and have no attribute __signature__, which inspect
// reads.
void add_signature(nb::handle type, nb::handle property) {
  auto* object = reinterpret_cast<PyTypeObject*>(type.ptr());
  if (PyDict_SetItemString(object->tp_dict, "__signature__", property.ptr()) != 0) nb::raise_python_error();
  PyType_Modified(object);
}

}  // namespace

std::vector<std::pair<nb::object, nb::object>> parameters_of(const std::string& signature) {
  const nb::object parsed = nb::module_::import_("ferry._signatures").attr("_parsed")(signature, nb::tuple());
  std::vector<std::pair<nb::object, nb::object>> parameters;
  for (const nb::handle parameter : nb::object(parsed.attr("parameters").attr("values")())) {
    const nb::object name = parameter.attr("name"), value = parameter.attr("default");
    const auto text = nb::cast<std::string>(name);
    if (text == "self" || text == "lane") continue;
    parameters.emplace_back(name, value.is(parameter.attr("empty")) ? nb::none() : value);
  }
  return parameters;
}

void publish_signatures(nb::module_& module) {
  const nb::module_ signatures = nb::module_::import_("ferry._signatures");
  const nb::object placement = module.attr("Placement");
  const nb::object bound = placement.attr("blocks")(1, 1).attr("location");
  add_signature(placement.attr("blocks").type(), signatures.attr("function"));
  add_signature(placement.attr("location").type(), signatures.attr("function"));
  add_signature(bound.type(), signatures.attr("bound_method"));
  signatures.attr("describe_classes")(module);
}

}  // namespace ferry::python
