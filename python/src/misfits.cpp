// Calls of Python functions whose arguments do not fit the function's signature.
#include <Python.h>
#include <structmember.h>

#include <cstddef>

#include "base/nearest.hpp"
#include "bindings.hpp"
#include "casters.hpp"

namespace nb = nanobind;

namespace ferry::python {
namespace {

// A callable of Python that calls `function` and, if its arguments do not fit that, `misfit` with the same
// arguments. A function in Python in its place would take longer than the host's work for some calls.
struct FittedFunction {
  PyObject_HEAD vectorcallfunc call;
  PyObject *function, *misfit, *attributes;
};

FittedFunction& fitted(PyObject* self) {
  return *reinterpret_cast<FittedFunction*>(self);
}

PyObject* call_fitted(PyObject* self, PyObject* const* arguments, std::size_t count, PyObject* names) {
  PyObject* const result = PyObject_Vectorcall(fitted(self).function, arguments, count, names);
  if (result != nullptr || PyErr_ExceptionMatches(PyExc_TypeError) == 0) return result;
  nb::python_error error;              // takes what was raised
  if (error.traceback().is_valid()) {  // by the function itself
    error.restore();
    return nullptr;
  }
  return PyObject_Vectorcall(fitted(self).misfit, arguments, count, names);
}

// As a function, it is a method of the object whose class it is an attribute of.
PyObject* bound_method(PyObject* self, PyObject* object, PyObject*) {
  if (object != nullptr && object != Py_None) return PyMethod_New(self, object);
  Py_INCREF(self);
  return self;
}

void free_fitted(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  FittedFunction& of = fitted(self);
  Py_XDECREF(of.function);
  Py_XDECREF(of.misfit);
  Py_XDECREF(of.attributes);
  type->tp_free(self);
  Py_DECREF(type);
}

nb::object make_type() {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(FittedFunction, call), READONLY, nullptr},
      {"__dictoffset__", T_PYSSIZET, offsetof(FittedFunction, attributes), READONLY, nullptr},
      {}};
  static PyType_Slot slots[] = {{Py_tp_call, reinterpret_cast<void*>(&PyVectorcall_Call)},
                                {Py_tp_descr_get, reinterpret_cast<void*>(&bound_method)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(&free_fitted)},
                                {Py_tp_members, members},
                                {}};
  constexpr unsigned kFlags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR;
  static PyType_Spec spec{"ferry._core.FittedFunction", sizeof(FittedFunction), 0, kFlags, slots};
  return nb::steal(PyType_FromSpec(&spec));
}

nb::object make_fitted(const nb::object& function, const nb::object& misfit) {
  static const nb::handle type = make_type().release();
  nb::object made = nb::steal(PyType_GenericAlloc(reinterpret_cast<PyTypeObject*>(type.ptr()), 0));
  if (!made.is_valid()) throw nb::python_error();
  FittedFunction& of = fitted(made.ptr());
  of.call = &call_fitted;
  of.function = nb::object(function).release().ptr();
  of.misfit = nb::object(misfit).release().ptr();
  return made;
}

}  // namespace

void bind_misfits(nb::module_& module) {
  module.def("_fitted_function", &make_fitted, nb::arg("function"), nb::arg("misfit"),
             "A callable like `function`, which calls `misfit` instead if the arguments do not fit.");
  module.def(
      "_did_you_mean",
      [](const std::string& given, const std::vector<std::string>& names) {
        return did_you_mean(given, names);
      },
      nb::arg("given"), nb::arg("names"), "For messages: ' (did you mean NAME?)', or nothing.");
}

}  // namespace ferry::python
