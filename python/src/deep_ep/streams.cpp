#include "deep_ep/streams.hpp"

#include <utility>

#include "arrays/framework.hpp"
#include "bindings.hpp"
#include "ferry/error.hpp"

namespace ferry::python {

using namespace nb::literals;

Stream current_stream(Device device) {
  return stream_of(nb::none(), Framework::torch, device);
}

namespace {

// Keeps PyTorch from giving the tensor's memory to others before the work of `stream` so far is done.
void record_use(nb::handle tensor, nb::handle stream) {
  static PyObject* method = nullptr;
  if (method == nullptr) method = PyUnicode_InternFromString("record_stream");
  PyObject* arguments[] = {tensor.ptr(), stream.ptr()};
  const nb::object done = nb::steal(PyObject_VectorcallMethod(method, arguments, 2, nullptr));
  if (!done.is_valid()) throw nb::python_error();
}

}  // namespace

KeptTensors::~KeptTensors() {
  if (tensors_.empty()) return;
  const nb::error_scope error_of_caller;
  try {
    for (const nb::object& tensor : tensors_) record_use(tensor, user_);
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("ferry.deep_ep: the end of a call's event");
  }
}

void KeptTensors::release(Stream waiting) {
  if (waiting.handle == owner_.handle) tensors_.clear();
}

void EventHandle::current_stream_wait() {
  if (!event.recorded()) return;
  const Stream current = current_stream(event.device());
  event.make_wait(current);
  kept.release(current);
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

nb::object CallStreams::end(Device device, Stream stream, Stream current,
                            std::vector<nb::object> tensors) const {
  EventHandle handle;
  if (!is_host(device)) {
    handle.event.record(stream, device);
    handle.kept = KeptTensors(std::move(tensors), private_stream_, current);
  }
  return event_overlap(nb::cast(std::move(handle)));
}

StreamedCall::StreamedCall(CallStreams& streams, Framework framework, Device device,
                           const EventHandle* previous, bool async_finish)
    : streams_(streams), device_(device), async_finish_(async_finish) {
  if (is_host(device)) return;
  current_ = stream_of(nb::none(), framework, device);
  stream_ = streams.begin(device, current_, previous, async_finish);
  if (!async_finish && previous == nullptr) return;
  static CachedAttribute current_object, scope;
  current_object_ = current_object.get("torch.cuda", "current_stream")(device.device_id);
  scope_ = scope.get("torch.cuda", "stream")(streams.private_stream());
  scope_.attr("__enter__")();
}

StreamedCall::~StreamedCall() {
  leave();
}

void StreamedCall::leave() noexcept {
  if (!scope_.is_valid()) return;
  const nb::object scope = std::move(scope_);
  try {
    scope.attr("__exit__")(nb::none(), nb::none(), nb::none());
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("ferry.deep_ep: the end of a call's stream");
  }
}

nb::object StreamedCall::finish(std::vector<nb::object> inputs, const std::vector<nb::object>& outputs) {
  if (!current_object_.is_valid())
    return async_finish_ ? streams_.end(device_, stream_, current_, {}) : event_overlap(nb::none());
  leave();
  for (const nb::object& output : outputs) record_use(output, current_object_);
  if (async_finish_) return streams_.end(device_, stream_, current_, std::move(inputs));
  // Inputs that are freed after this are freed after the wait.
  StreamEvent done;
  done.record(stream_, device_);
  done.make_wait(current_);
  return event_overlap(nb::none());
}

namespace {

nb::handle overlap_type() {
  static CachedAttribute type;
  return type.get("ferry.deep_ep.utils", "EventOverlap");
}

}  // namespace

nb::object event_overlap(const nb::object& event) {
  return event.is_none() ? overlap_type()() : overlap_type()(event);
}

bool is_event_overlap(const nb::object& object) {
  if (!nb::isinstance(object, overlap_type())) return false;
  const nb::object event = object.attr("event");
  return event.is_none() || nb::isinstance<EventHandle>(event);
}

const EventHandle* event_of(const nb::object& overlap) {
  if (overlap.is_none() || !is_event_overlap(overlap)) return nullptr;
  const nb::object event = overlap.attr("event");
  return event.is_none() ? nullptr : &nb::cast<EventHandle&>(event);
}

namespace {

// A StreamedCall as a context of Python: the body of `with` is the call.
class CallScope {
 public:
  CallScope(nb::object streams, const nb::object& like, const nb::object& previous_event, bool async_finish)
      : streams_(std::move(streams)) {
    const Array found = inspect(like, "x");
    call_.emplace(nb::cast<CallStreams&>(streams_), found.framework, found.device, event_of(previous_event),
                  async_finish);
  }

  nb::object finish(const std::vector<nb::object>& inputs, const std::vector<nb::object>& outputs) {
    if (!call_) throw UsageError("the call has ended");
    return call_->finish(inputs, outputs);
  }
  void leave() { call_.reset(); }

 private:
  nb::object streams_;
  std::optional<StreamedCall> call_;
};

void bind_call_scope(nb::module_& module) {
  nb::class_<CallScope>(
      module, "_CallScope",
      "For ferry.deep_ep: the stream that _CallStreams chooses for a call on arrays as `like` is the "
      "current one within `with`.")
      .def(nb::init<nb::object, const nb::object&, const nb::object&, bool>(), "streams"_a, "like"_a,
           "previous_event"_a.none(), "async_finish"_a)
      .def("__enter__", [](const nb::object& self) { return self; })
      .def(
          "__exit__",
          [](CallScope& self, const nb::object&, const nb::object&, const nb::object&) { self.leave(); },
          nb::arg().none(), nb::arg().none(), nb::arg().none())
      .def("finish", &CallScope::finish, "inputs"_a, "outputs"_a,
           "Ends the call: returns its EventOverlap. `inputs`: tensors that it reads; `outputs`: that it has "
           "made.",
           nb::sig("def finish(self, inputs: list[typing.Any], outputs: list[typing.Any]) -> typing.Any"));
}

}  // namespace

void bind_deep_ep_streams(nb::module_& module) {
  bind_call_scope(module);
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
           nb::sig("def private_stream(self) -> typing.Any"));
}

}  // namespace ferry::python
