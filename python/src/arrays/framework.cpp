#include "arrays/framework.hpp"
#include "casters.hpp"

#include "base/text.hpp"
#include "cast.hpp"
#include "errors.hpp"
#include "ferry/error.hpp"

namespace ferry::python {

nb::handle CachedAttribute::get_if_loaded(const char* module, const char* attribute) {
  if (found_.is_valid()) return found_;
  const nb::object name = nb::str(module);
  const nb::object loaded = nb::steal(PyImport_GetModule(name.ptr()));
  if (!loaded.is_valid()) {
    clear_error();
    return {};
  }
  // An import may be in progress, so that the module exists and the attribute does not.
  if (nb::hasattr(loaded, attribute)) found_ = nb::object(loaded.attr(attribute)).release();
  return found_;
}

nb::handle CachedAttribute::get(const char* module, const char* attribute) {
  if (!found_.is_valid()) found_ = nb::object(nb::module_::import_(module).attr(attribute)).release();
  return found_;
}

Framework framework_of(nb::handle object) {
  static CachedAttribute torch, numpy, cupy;
  const auto is = [object](nb::handle type) {
    const int answer = type.is_valid() ? PyObject_IsInstance(object.ptr(), type.ptr()) : 0;
    if (answer < 0) throw nb::python_error();
    return answer == 1;
  };
  if (is(torch.get_if_loaded("torch", "Tensor"))) return Framework::torch;
  if (is(numpy.get_if_loaded("numpy", "ndarray"))) return Framework::numpy;
  if (is(cupy.get_if_loaded("cupy", "ndarray"))) return Framework::cupy;
  return Framework::dlpack;
}

nb::object type_object(Framework framework, Element element) {
  const std::string name = name_of(element);
  if (framework == Framework::torch) {
    return nb::borrow(nb::getattr(nb::module_::import_("torch"), name.c_str(), nb::handle()));
  }
  const bool extended = element == kBf16 || (element.bits == 8 && element.code > 6);
  if (extended) {
    const nb::object type = nb::module_::import_("ml_dtypes").attr(name.c_str());
    return nb::module_::import_("numpy").attr("dtype")(type);
  }
  return nb::module_::import_("numpy").attr("dtype")(name);
}

Array inspect(nb::handle object, const char* name) {
  switch (framework_of(object)) {
    case Framework::torch:
      return inspect_torch(object, name);
    case Framework::numpy:
      return inspect_numpy(object, name);
    case Framework::cupy:
      return inspect_cupy(object, name);
    case Framework::dlpack:
      break;
  }
  return inspect_dlpack(object, name);
}

namespace {

template <class Imported>
std::optional<Array> imported(nb::handle capsule) {
  Imported array;
  if (!nb::try_cast(nb::borrow(capsule), array)) {
    clear_error();
    return std::nullopt;
  }
  // The exporter may have made this memory for the import alone, so the import must live on.
  const auto release = [](void* import) noexcept { delete static_cast<Imported*>(import); };
  Array found{.data = const_cast<void*>(static_cast<const void*>(array.data())),
              .element = array.dtype(),
              .device = {array.device_type(), array.device_id()},
              .framework = Framework::dlpack,
              .owner = nb::capsule(new Imported(array), release)};
  for (std::size_t i = 0; i < array.ndim(); ++i) {
    found.shape.push_back(static_cast<std::int64_t>(array.shape(i)));
    found.strides.push_back(array.stride(i));
  }
  return found;
}

// What `export_array`, an array's __dlpack__, returns. Libraries of before DLPack 1.0 do not know
// max_version, and export read-only arrays with it alone.
nb::object exported(const nb::object& export_array, const char* name) {
  using namespace nb::literals;
  try {
    try {
      return export_array("max_version"_a = nb::make_tuple(1, 0));
    } catch (nb::python_error& error) {
      if (!error.matches(PyExc_TypeError)) throw;
      return export_array();
    }
  } catch (nb::python_error& error) {
    if (error.matches(nb::module_::import_("ferry.error").attr("Error"))) throw;  // says what is wrong itself
    refuse_from(error, str(name, ": its __dlpack__ failed: ", text_of(error)));
  }
}

}  // namespace

Array inspect_dlpack(nb::handle object, const char* name) {
  nb::object capsule = nb::borrow(object);
  if (PyCapsule_CheckExact(object.ptr())) {
    const char* kind = PyCapsule_GetName(object.ptr());
    if (kind != nullptr && std::string(kind).rfind("used_", 0) == 0) {
      throw UsageError(str(name, ": a DLPack capsule that was used before: pass the array itself"));
    }
  } else {
    const nb::object export_array = attribute_of(object, "__dlpack__");
    if (!export_array.is_valid()) {
      const std::string type = nb::cast<std::string>(nb::type_name(object.type()));
      throw UsageError(str(
          name, ": expected an array of NumPy, PyTorch or CuPy, or an object with __dlpack__, got ", type));
    }
    capsule = exported(export_array, name);
  }
  // A read-only array refuses the first, writable import.
  if (std::optional<Array> found = imported<nb::ndarray<>>(capsule)) return *std::move(found);
  if (std::optional<Array> found = imported<nb::ndarray<nb::ro>>(capsule)) {
    found->read_only = true;
    return *std::move(found);
  }
  throw UsageError(str(name, ": its __dlpack__ returns no readable array"));
}

}  // namespace ferry::python
