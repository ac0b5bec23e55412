// Reads and makes PyTorch tensors. PyTorch 2.10 and later offer DLPackExchangeAPI, which reads a tensor in a
// fraction of a microsecond; without it, attributes are read one by one. PyTorch's __dlpack__ and from_dlpack
// are written in Python and would take longer than a whole call may, on GPUs above all.
#include <cstdint>

#include "arrays/array.hpp"
#include "arrays/framework.hpp"
#include "base/text.hpp"
#include "cast.hpp"
#include "casters.hpp"
#include "ferry/error.hpp"
#include "interpreter.hpp"

namespace ferry::python {
namespace {

// The table of C functions of DLPack 1.3. DLPack's own header is not installed everywhere, so its layout is
// declared here.
struct DlpackVersion {
  std::uint32_t major = 0, minor = 0;
};

using DlpackTensor = nb::dlpack::dltensor;

struct ManagedTensor {
  DlpackVersion version;
  void* context;
  void (*destroy)(ManagedTensor*);
  std::uint64_t flags;
  DlpackTensor tensor;
};

// Functions return 0 on success, else -1 with a Python error set.
struct DlpackExchangeApi {
  DlpackVersion version;
  DlpackExchangeApi* previous;
  int (*managed_tensor_allocator)(DlpackTensor* prototype, ManagedTensor** out, void* context,
                                  void (*set_error)(void* context, const char* kind, const char* message));
  int (*managed_tensor_from_object)(void* object, ManagedTensor** out);
  int (*managed_tensor_to_object)(ManagedTensor* tensor, void** out);
  int (*tensor_from_object)(void* object, DlpackTensor* out);  // may be null
  int (*current_work_stream)(std::int32_t device_type, std::int32_t device_id, void** out);
};

// An attribute name that every call needs, created once.
PyObject* interned(PyObject*& cached, const char* name) {
  if (cached == nullptr) cached = PyUnicode_InternFromString(name);
  return cached;
}

const DlpackExchangeApi* find_dlpack_api() {
  static CachedAttribute tensor;
  const nb::handle type = tensor.get_if_loaded("torch", "Tensor");
  if (!type.is_valid() || !nb::hasattr(type, "__dlpack_c_exchange_api__")) return nullptr;
  const nb::object capsule = type.attr("__dlpack_c_exchange_api__");
  if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return nullptr;
  const auto* found =
      static_cast<const DlpackExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  return found->version.major == 1 && found->tensor_from_object != nullptr ? found : nullptr;
}

// PyTorch's table, or null if it has none. Call it only once a tensor exists, so that PyTorch is loaded.
const DlpackExchangeApi* dlpack_api() {
  // The GIL guards these. A static's initialiser would add the compiler's lock, and a thread that holds the
  // GIL and waits for that lock could wait for a thread that holds that lock and waits for the GIL.
  static bool searched = false;
  static const DlpackExchangeApi* found = nullptr;
  if (!searched) found = find_dlpack_api();
  searched = true;
  return found;
}

Element element_from_torch(nb::handle type) {
  // PyTorch's dtype objects live as long as the process, so each one's name is parsed once.
  static std::vector<std::pair<PyObject*, Element>> known;
  for (const auto& [object, element] : known) {
    if (object == type.ptr()) return element;
  }
  const auto name = nb::cast<std::string>(nb::str(type));
  const Element element = element_named(name.substr(name.find('.') + 1));
  known.emplace_back(type.ptr(), element);
  return element;
}

Device device_from_torch(nb::handle device) {
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

bool is_plain_tensor(nb::handle object) {
  static CachedAttribute tensor;
  return tensor.get("torch", "Tensor").ptr() == reinterpret_cast<PyObject*>(Py_TYPE(object.ptr()));
}

// Reads the tensor by DLPackExchangeAPI; false if that cannot. inspect_by_attributes() then reads it, or
// reports why it is not supported. Subclasses of Tensor go there too, because they may have no memory.
bool inspect_by_table(nb::handle object, Array& found) {
  if (!is_plain_tensor(object) || dlpack_api() == nullptr) return false;
  DlpackTensor tensor{};
  if (dlpack_api()->tensor_from_object(object.ptr(), &tensor) != 0) {
    clear_error();
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

void inspect_by_attributes(nb::handle object, const char* name, Array& found) {
  const nb::object type = object.attr("dtype"), device = object.attr("device");
  found.element = element_from_torch(type);
  found.device = device_from_torch(device);
  if (found.element.bits == 0 || found.device.device_type < 0) {
    const auto place = nb::cast<std::string>(nb::str(device));
    throw UsageError(str(name, ": tensors of ", nb::cast<std::string>(nb::str(type)), " on ", place,
                         " are not supported",
                         place == "meta" ? ": they have no values; pass tensors on cpu or cuda" : ""));
  }
  const nb::object layout_object = object.attr("layout");
  const auto layout = nb::cast<std::string>(nb::str(layout_object));
  if (layout != "torch.strided") {
    throw UsageError(
        str(name, ": tensors of layout ", layout, " are not supported: pass the tensor's to_dense()"));
  }
  append(found.shape, object.attr("shape"));
  append(found.strides, object.attr("stride")());
  found.data = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(object.attr("data_ptr")()));
}

// Context of a tensor over memory that `owner` keeps alive.
struct View {
  ManagedTensor managed;
  Shape shape, strides;
  PyObject* owner;
};

// PyTorch may release a tensor in any thread, without the GIL, and after the interpreter has ended.
void destroy_view(ManagedTensor* managed) {
  auto* view = static_cast<View*>(managed->context);
  if (const GilAcquire locked; locked) survive_end_of_python([&] { Py_XDECREF(view->owner); });
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

nb::handle torch_dtype_of(Element element) {
  static std::vector<std::pair<Element, PyObject*>> known;
  for (const auto& [of, type] : known) {
    if (of == element) return type;
  }
  nb::object type = type_object(Framework::torch, element);
  if (!type.is_valid()) throw UsageError(str("PyTorch has no type ", name_of(element)));
  known.emplace_back(element, type.ptr());
  return type.release();
}

nb::handle torch_device_of(Device device) {
  static std::vector<std::pair<int, PyObject*>> known;  // by device number; the host's is -1
  const int number = is_host(device) ? -1 : device.device_id;
  for (const auto& [of, object] : known) {
    if (of == number) return object;
  }
  static CachedAttribute type;
  nb::object made = type.get("torch", "device")(is_host(device) ? std::string("cpu") : name_of(device));
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

// The allocation function of PyTorch's compiled code, three times as fast as torch.empty. Invalid where
// PyTorch has none, or where `device` is not the current one, which the function would use.
nb::handle find_fast_empty(Device device) {
  constexpr const char* kModule = "torch._C._dynamo.guards";
  static CachedAttribute on_host, on_gpu, current;
  if (is_host(device)) return on_host.get_if_loaded(kModule, "_empty_strided_cpu");
  const nb::handle current_device = current.get_if_loaded("torch._C", "_cuda_getDevice");
  const bool is_current = current_device.is_valid() && nb::cast<int>(current_device()) == device.device_id;
  return is_current ? on_gpu.get_if_loaded(kModule, "_empty_strided_cuda") : nb::handle();
}

}  // namespace

std::optional<int> current_torch_device() {
  static CachedAttribute started, current;
  const nb::handle has_started = started.get_if_loaded("torch.cuda", "is_initialized");
  if (!has_started.is_valid() || !nb::cast<bool>(has_started())) return std::nullopt;
  return nb::cast<int>(current.get("torch.cuda", "current_device")());
}

bool gradients_are_recorded() {
  static CachedAttribute enabled;
  return nb::cast<bool>(enabled.get("torch", "is_grad_enabled")());
}

void refuse_gradients(nb::handle object, const char* name) {
  static PyObject* requires_grad = nullptr;
  const nb::object required =
      nb::steal(PyObject_GetAttr(object.ptr(), interned(requires_grad, "requires_grad")));
  if (!required.is_valid()) throw nb::python_error();
  if (required.ptr() == Py_True && gradients_are_recorded()) {
    throw UsageError(str(name,
                         ": requires a gradient, which an exchange does not record: use ferry.torch, "
                         "torch.no_grad() or detach()"));
  }
}

bool is_lazily_negated(nb::handle tensor, Element element) {
  // Lazily negated tensors are parts of complex tensors, so integers are never.
  using Code = nb::dlpack::dtype_code;
  const auto code = static_cast<Code>(element.code);
  if (code == Code::Int || code == Code::UInt) return false;
  static PyObject *is_neg = nullptr, *is_conj = nullptr;
  const auto has = [tensor](PyObject* method) {
    const nb::object answer = nb::steal(PyObject_CallMethodNoArgs(tensor.ptr(), method));
    if (!answer.is_valid()) throw nb::python_error();
    return answer.ptr() == Py_True;
  };
  if (has(interned(is_neg, "is_neg"))) return true;
  return code == Code::Complex && has(interned(is_conj, "is_conj"));
}

Array inspect_torch(nb::handle object, const char* name) {
  Array found{.framework = Framework::torch, .owner = nb::borrow(object)};
  if (!inspect_by_table(object, found)) inspect_by_attributes(object, name, found);
  return found;
}

std::optional<Stream> current_torch_stream(Device device) {
  void* stream = nullptr;
  if (dlpack_api() == nullptr) return std::nullopt;
  if (dlpack_api()->current_work_stream(device.device_type, device.device_id, &stream) == 0)
    return Stream{stream};
  clear_error();
  return std::nullopt;
}

nb::object torch_view_of(void* data, Element element, const Shape& shape, const Shape& strides, Device device,
                         nb::handle owner) {
  if (dlpack_api() == nullptr) return {};
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
  if (dlpack_api()->managed_tensor_to_object(&view->managed, &made) == 0)
    return nb::steal(static_cast<PyObject*>(made));
  throw nb::python_error();
}

TensorFactory::TensorFactory(Device device) : device_(device), fast_empty_(find_fast_empty(device)) {}

TensorShape::TensorShape(Element element_type, Shape lengths_of, Shape strides_of)
    : element(element_type),
      lengths(std::move(lengths_of)),
      strides(std::move(strides_of)),
      lengths_tuple(tuple_of(lengths)),
      strides_tuple(tuple_of(strides.empty() ? dense_strides(lengths) : strides)) {}

std::int64_t TensorShape::span() const {
  const Shape steps = strides.empty() ? dense_strides(lengths) : strides;
  std::int64_t last = 0;
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    if (lengths[i] == 0) return 0;
    last += (lengths[i] - 1) * steps[i];
  }
  return last + 1;
}

nb::object TensorFactory::make(const TensorShape& shape) const {
  const nb::handle type = torch_dtype_of(shape.element);
  nb::object made;
  if (fast_empty_.is_valid()) {
    PyObject* arguments[] = {shape.lengths_tuple.ptr(), shape.strides_tuple.ptr(), type.ptr()};
    made = nb::steal(PyObject_Vectorcall(fast_empty_.ptr(), arguments, 3, nullptr));
  } else {
    static CachedAttribute empty;
    static PyObject* names = nullptr;
    if (names == nullptr) names = nb::make_tuple(nb::str("dtype"), nb::str("device")).release().ptr();
    PyObject* arguments[] = {shape.lengths_tuple.ptr(), shape.strides_tuple.ptr(), type.ptr(),
                             torch_device_of(device_).ptr()};
    made = nb::steal(PyObject_Vectorcall(empty.get("torch", "empty_strided").ptr(), arguments, 2, names));
  }
  if (!made.is_valid()) throw nb::python_error();
  return made;
}

nb::object TensorFactory::make(const TensorShape& shape, void*& data) const {
  nb::object made = make(shape);
  DlpackTensor tensor{};
  if (dlpack_api() != nullptr && dlpack_api()->tensor_from_object(made.ptr(), &tensor) == 0) {
    data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  } else {
    clear_error();
    data = inspect_torch(made, "memory").data;
  }
  return made;
}

}  // namespace ferry::python
