#include "deep_ep/streams.hpp"

#include "arrays/framework.hpp"
#include "bindings.hpp"

namespace ferry::python {

using namespace nb::literals;

Stream current_stream(Device device) {
  return stream_of(nb::none(), Framework::torch, device);
}

void EventHandle::current_stream_wait() const {
  if (event.recorded()) event.make_wait(current_stream(event.device()));
}

namespace {

// Without initialised CUDA there is no work to wait for.
void construct_event(EventHandle* self) {
  new (self) EventHandle;
  const std::optional<int> device = has_cuda() ? current_torch_device() : std::nullopt;
  if (!device) return;
  const Device where{nb::device::cuda::value, *device};
  self->event.record(current_stream(where), where);
}

}  // namespace

nb::object CallStreams::private_stream() {
  if (private_stream_.is_valid()) return private_stream_;
  static CachedAttribute available, stream;
  const nb::handle is_available = available.get_if_loaded("torch.cuda", "is_available");
  if (!is_available.is_valid() || !nb::cast<bool>(is_available())) return nb::none();
  private_stream_ = stream.get("torch.cuda", "Stream")("priority"_a = -1);
  private_handle_.handle =
      reinterpret_cast<void*>(nb::cast<std::uintptr_t>(private_stream_.attr("cuda_stream")));
  return private_stream_;
}

Stream CallStreams::private_handle() {
  if (!private_stream_.is_valid()) private_stream();
  return private_handle_;
}

Stream CallStreams::begin(Device device, Stream current, const EventHandle* previous, bool async_finish) {
  if (is_host(device)) return current;
  Stream stream = current;
  // A synchronous call without an event runs on the current stream: on the private one it would only add two
  // waits.
  if (async_finish || previous != nullptr) {
    stream = private_handle();
    if (previous != nullptr) {
      previous->event.make_wait(stream);
    } else {
      order_.record(current, device);
      order_.make_wait(stream);
    }
  }
  follow(device, stream);
  return stream;
}

void CallStreams::follow(Device device, Stream stream) {
  if (is_host(device)) return;
  // While a graph is captured no wait is needed: its calls are on streams that wait for one another, and
  // earlier work has finished when it is replayed.
  if (any_ && last_.handle != stream.handle && !is_capturing(stream.handle)) {
    order_.record(last_, device);
    order_.make_wait(stream);
  }
  last_ = stream;
  any_ = true;
}

EventHandle CallStreams::end(Device device, Stream stream) {
  EventHandle handle;
  if (!is_host(device)) handle.event.record(stream, device);
  return handle;
}

void CallStreams::record_use(nb::handle tensor) {
  static PyObject* method = nullptr;
  if (method == nullptr) method = PyUnicode_InternFromString("record_stream");
  PyObject* arguments[] = {tensor.ptr(), private_stream_.ptr()};
  const nb::object done = nb::steal(PyObject_VectorcallMethod(method, arguments, 2, nullptr));
  if (!done.is_valid()) throw nb::python_error();
}

void bind_deep_ep_streams(nb::module_& module) {
  nb::class_<EventHandle>(module, "EventHandle",
                          "An event recorded on the current stream. Without PyTorch or a GPU calls are "
                          "synchronous, and it is empty.")
      .def("__init__", &construct_event)
      .def("current_stream_wait", &EventHandle::current_stream_wait,
           "Makes the current stream wait for the event.");
  nb::class_<CallStreams>(module, "_CallStreams", "For ferry.deep_ep: chooses the stream of each call.")
      .def(nb::init<>())
      .def("private_stream", &CallStreams::private_stream,
           "The private stream of asynchronous calls, a torch.cuda.Stream; None without a GPU.",
           nb::sig("def private_stream(self) -> typing.Any"))
      .def(
          "begin",
          [](CallStreams& self, int device, const EventHandle* previous, bool async_finish) {
            const Device where{nb::device::cuda::value, device};
            self.begin(where, current_stream(where), previous, async_finish);
          },
          "device"_a, "previous"_a.none(), "async_finish"_a,
          "Makes the stream of a call wait for what must come before.");
}

}  // namespace ferry::python
