// PyTorch. From 2.10 on it has DLPack's table of functions, which tells of a tensor in a fraction of a
// microsecond; without it attributes are read one by one. Its __dlpack__ and from_dlpack are written in
// Python and take longer than a whole call may, on devices above all.
#include <nanobind/stl/string.h>

#include "arrays/dlpack_exchange_api.hpp"
#include "arrays/framework.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"

namespace ferry::python {
namespace {

// Names that every call needs, made once.
PyObject* interned(PyObject*& kept, const char* name) {
  if (kept == nullptr) kept = PyUnicode_InternFromString(name);
  return kept;
}

const DlpackExchange* find_exchange() {
  static Kept tensor;
  const nb::handle type = tensor.if_loaded("torch", "Tensor");
  if (!type.is_valid() || !nb::hasattr(type, "__dlpack_c_exchange_api__")) return nullptr;
  const nb::object capsule = type.attr("__dlpack_c_exchange_api__");
  if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return nullptr;
  const auto* found =
      static_cast<const DlpackExchange*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  return found->version.major == 1 && found->look != nullptr ? found : nullptr;
}

// Asked for only where there are tensors, so PyTorch is there. Null: it has no such table.
const DlpackExchange* exchange() {
  // The interpreter's lock guards it; a lock of the compiler's own could wait for a thread that waits for
  // that.
  static bool asked = false;
  static const DlpackExchange* found = nullptr;
  if (!asked) found = find_exchange();
  asked = true;
  return found;
}

Element element_of_torch(nb::handle type) {
  // torch's types are objects that live as long as the process: "torch.bfloat16" is read once for each.
  static std::vector<std::pair<PyObject*, Element>> known;
  for (const auto& [object, element] : known) {
    if (object == type.ptr()) return element;
  }
  const auto name = nb::cast<std::string>(nb::str(type));
  const Element element = element_named(name.substr(name.find('.') + 1));
  known.emplace_back(type.ptr(), element);
  return element;
}

Device place_of_torch(nb::handle device) {
  const nb::object type = device.attr("type");
  if (PyUnicode_CompareWithASCIIString(type.ptr(), "cuda") == 0) {
    const nb::object index = device.attr("index");
    return {nb::device::cuda::value, index.is_none() ? 0 : nb::cast<int>(index)};
  }
  if (PyUnicode_CompareWithASCIIString(type.ptr(), "cpu") == 0) return kHost;
  return {-1, 0};
}

void append(Shape& shape, nb::handle tuple) {
  const Py_ssize_t count = PyTuple_GET_SIZE(tuple.ptr());
  for (Py_ssize_t i = 0; i < count; ++i) {
    shape.push_back(nb::cast<std::int64_t>(nb::handle(PyTuple_GET_ITEM(tuple.ptr(), i))));
  }
}

bool gradients_are_recorded() {
  static Kept enabled;
  return nb::cast<bool>(enabled.of("torch", "is_grad_enabled")());
}

bool is_plain_tensor(nb::handle object) {
  static Kept tensor;
  return tensor.of("torch", "Tensor").ptr() == reinterpret_cast<PyObject*>(Py_TYPE(object.ptr()));
}

// Whether the table tells of it. What it does not know, attributes are asked about, for the message if
// nothing else; so are tensors of other classes, which may have no memory.
bool look_by_table(nb::handle object, Array& found) {
  if (!is_plain_tensor(object) || exchange() == nullptr) return false;
  DlpackTensor tensor{};
  if (exchange()->look(object.ptr(), &tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  const bool on_gpu = tensor.device.device_type == nb::device::cuda::value;
  const bool named = is_named(tensor.dtype);
  if (!named || !(on_gpu || tensor.device.device_type == nb::device::cpu::value)) return false;
  found.data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  found.element = tensor.dtype;
  found.device = on_gpu ? tensor.device : kHost;
  found.shape.assign(tensor.shape, tensor.shape + tensor.ndim);
  found.strides.assign(tensor.strides, tensor.strides + tensor.ndim);
  return true;
}

void look_by_attributes(nb::handle object, const char* name, Array& found) {
  const nb::object type = object.attr("dtype"), device = object.attr("device");
  found.element = element_of_torch(type);
  found.device = place_of_torch(device);
  if (found.element.bits == 0 || found.device.device_type < 0) {
    throw UsageError(str(name, ": a tensor of ", nb::cast<std::string>(nb::str(type)), " on ",
                         nb::cast<std::string>(nb::str(device)), " is none Ferry carries"));
  }
  const nb::object layout_object = object.attr("layout");
  const auto layout = nb::cast<std::string>(nb::str(layout_object));
  if (layout != "torch.strided") {
    throw UsageError(
        str(name, ": a tensor of layout ", layout, " is none Ferry carries: give it dense, by to_dense()"));
  }
  append(found.shape, object.attr("shape"));
  append(found.strides, object.attr("stride")());
  found.data = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(object.attr("data_ptr")()));
}

// What a tensor over foreign memory keeps.
struct View {
  ManagedTensor managed;
  Shape shape, strides;
  PyObject* owner;
};

// PyTorch may let go of a tensor in any thread, without the interpreter's lock, and after the interpreter's
// end.
void destroy_view(ManagedTensor* managed) {
  auto* view = static_cast<View*>(managed->context);
  if (Py_IsInitialized() != 0) {
    const nb::gil_scoped_acquire locked;
    Py_XDECREF(view->owner);
  }
  delete view;
}

Shape dense_strides(const Shape& shape) {
  Shape strides(shape.size());
  std::int64_t step = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    strides[i] = step;
    step *= shape[i];
  }
  return strides;
}

nb::handle type_of_torch(Element element) {
  static std::vector<std::pair<Element, PyObject*>> known;
  for (const auto& [of, type] : known) {
    if (of == element) return type;
  }
  nb::object type = type_object(Framework::torch, element);
  if (!type.is_valid()) throw UsageError(str("PyTorch has no type ", name_of(element)));
  known.emplace_back(element, type.ptr());
  return type.release();
}

nb::handle device_object(Device device) {
  static std::vector<std::pair<int, PyObject*>> known;  // by the device's number, the processor's is -1
  const int number = is_host(device) ? -1 : device.device_id;
  for (const auto& [of, object] : known) {
    if (of == number) return object;
  }
  static Kept type;
  nb::object made = type.of("torch", "device")(is_host(device) ? std::string("cpu") : name_of(device));
  known.emplace_back(number, made.ptr());
  return made.release();
}

nb::object tuple_of(const Shape& numbers) {
  nb::object tuple = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(numbers.size())));
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    PyTuple_SET_ITEM(tuple.ptr(), static_cast<Py_ssize_t>(i), PyLong_FromLongLong(numbers[i]));
  }
  return tuple;
}

// The allocation that PyTorch's own compiled code calls: a third of torch.empty's time. Invalid where there
// is none, or where it would choose another device.
nb::handle quick_empty(Device device) {
  constexpr const char* kModule = "torch._C._dynamo.guards";
  static Kept on_host, on_gpu, current;
  if (is_host(device)) return on_host.if_loaded(kModule, "_empty_strided_cpu");
  const nb::handle current_device = current.if_loaded("torch._C", "_cuda_getDevice");
  const bool is_current = current_device.is_valid() && nb::cast<int>(current_device()) == device.device_id;
  return is_current ? on_gpu.if_loaded(kModule, "_empty_strided_cuda") : nb::handle();
}

}  // namespace

std::optional<int> device_of_torch() {
  static Kept started, current;
  const nb::handle has_started = started.if_loaded("torch.cuda", "is_initialized");
  if (!has_started.is_valid() || !nb::cast<bool>(has_started())) return std::nullopt;
  return nb::cast<int>(current.of("torch.cuda", "current_device")());
}

void refuse_gradients(nb::handle object, const char* name) {
  static PyObject* requires_grad = nullptr;
  const nb::object required =
      nb::steal(PyObject_GetAttr(object.ptr(), interned(requires_grad, "requires_grad")));
  if (!required.is_valid()) throw nb::python_error();
  if (required.ptr() == Py_True && gradients_are_recorded()) {
    throw UsageError(str(name,
                         ": requires a gradient, which an exchange does not record: use ferry.torch, "
                         "torch.no_grad(), or detach()"));
  }
}

bool is_lazily_negated(nb::handle tensor, Element element) {
  // Lazy negatives are parts of complex tensors, which integers are not.
  using Code = nb::dlpack::dtype_code;
  const auto code = static_cast<Code>(element.code);
  if (code == Code::Int || code == Code::UInt) return false;
  static PyObject *is_neg = nullptr, *is_conj = nullptr;
  const auto has = [tensor](PyObject* question) {
    const nb::object answer = nb::steal(PyObject_CallMethodNoArgs(tensor.ptr(), question));
    if (!answer.is_valid()) throw nb::python_error();
    return answer.ptr() == Py_True;
  };
  if (has(interned(is_neg, "is_neg"))) return true;
  return code == Code::Complex && has(interned(is_conj, "is_conj"));
}

Array look_at_torch(nb::handle object, const char* name) {
  Array found{.framework = Framework::torch, .owner = nb::borrow(object)};
  if (!look_by_table(object, found)) look_by_attributes(object, name, found);
  return found;
}

std::optional<Stream> stream_of_torch(Device device) {
  void* stream = nullptr;
  if (exchange() == nullptr) return std::nullopt;
  if (exchange()->current_stream(device.device_type, device.device_id, &stream) == 0) return Stream{stream};
  PyErr_Clear();
  return std::nullopt;
}

nb::object view_of_torch(void* data, Element element, const Shape& shape, const Shape& strides, Device device,
                         nb::handle owner) {
  if (exchange() == nullptr) return {};
  auto* view = new View{.managed = {},
                        .shape = shape,
                        .strides = strides.empty() ? dense_strides(shape) : strides,
                        .owner = owner.inc_ref().ptr()};
  view->managed = {.version = {1, 0}, .context = view, .destroy = destroy_view, .flags = 0, .tensor = {}};
  view->managed.tensor = {.data = data,
                          .device = device,
                          .ndim = static_cast<std::int32_t>(shape.size()),
                          .dtype = element,
                          .shape = view->shape.data(),
                          .strides = view->strides.data(),
                          .byte_offset = 0};
  void* made = nullptr;
  if (exchange()->object_of_managed(&view->managed, &made) == 0)
    return nb::steal(static_cast<PyObject*>(made));
  throw nb::python_error();
}

NewTensors::NewTensors(Device device) : device_(device), quick_(quick_empty(device)) {}

nb::object NewTensors::make(Element element, const Shape& shape) const {
  const nb::handle type = type_of_torch(element);
  const nb::object lengths = tuple_of(shape);
  nb::object made;
  if (quick_.is_valid()) {
    const nb::object strides = tuple_of(dense_strides(shape));
    PyObject* arguments[] = {lengths.ptr(), strides.ptr(), type.ptr()};
    made = nb::steal(PyObject_Vectorcall(quick_.ptr(), arguments, 3, nullptr));
  } else {
    static Kept usual;
    static PyObject* names = nullptr;
    if (names == nullptr) names = nb::make_tuple(nb::str("dtype"), nb::str("device")).release().ptr();
    PyObject* arguments[] = {lengths.ptr(), type.ptr(), device_object(device_).ptr()};
    made = nb::steal(PyObject_Vectorcall(usual.of("torch", "empty").ptr(), arguments, 1, names));
  }
  if (!made.is_valid()) throw nb::python_error();
  return made;
}

nb::object NewTensors::make(Element element, const Shape& shape, void*& data) const {
  nb::object made = make(element, shape);
  DlpackTensor tensor{};
  if (exchange() != nullptr && exchange()->look(made.ptr(), &tensor) == 0) {
    data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  } else {
    PyErr_Clear();
    data = look_at_torch(made, "memory").data;
  }
  return made;
}

}  // namespace ferry::python
