// The streams and events of ferry.deep_ep: which stream a call runs on, and what it waits for.
#pragma once

#include <vector>

#include "device.hpp"

namespace ferry::python {

// Tensors that the private stream still uses, with memory that PyTorch gives out in the order of another
// stream. They are kept until that stream waits for the private one: what it does later is then in order.
// This costs nothing, whereas record_stream() takes time here and when the tensor is freed.
class KeptTensors {
 public:
  KeptTensors() = default;
  KeptTensors(std::vector<nb::object> tensors, nb::object user, Stream owner)
      : tensors_(std::move(tensors)), user_(std::move(user)), owner_(owner) {}
  KeptTensors(KeptTensors&&) = default;
  KeptTensors& operator=(KeptTensors&& other) noexcept {
    tensors_.swap(other.tensors_);
    std::swap(user_, other.user_);
    std::swap(owner_, other.owner_);
    return *this;
  }
  // If no wait has released them, PyTorch learns of the use.
  ~KeptTensors();

  // `waiting` waits for the private stream from here on.
  void release(Stream waiting);

 private:
  std::vector<nb::object> tensors_;
  nb::object user_;  // the private stream, a torch.cuda.Stream
  Stream owner_{};   // in whose order PyTorch gives out their memory
};

// The Python class EventHandle: an event recorded on PyTorch's current stream when it is made. Empty without
// PyTorch or a GPU, where calls are synchronous.
struct EventHandle {
  StreamEvent event;
  KeptTensors kept{};  // of the call that the event ends

  // Makes PyTorch's current stream wait.
  void current_stream_wait();
};

// Chooses the stream of each call of a Buffer, and keeps the calls in order across streams. Ranks issue their
// calls in the same order, and kernels wait for those of other ranks: in another order on each GPU they could
// wait for each other.
class CallStreams {
 public:
  // The private high-priority stream of asynchronous calls, a torch.cuda.Stream; None without a GPU.
  nb::object private_stream();

  // The stream of a call whose arrays are on `device`, made to wait for what must come before. Calls with an
  // event to wait for, and asynchronous calls, run on the private stream; others on `current`, PyTorch's.
  Stream begin(Device device, Stream current, const EventHandle* previous, bool async_finish);

  // The same for work that must run on `stream`.
  void follow(Device device, Stream stream);

  // Returns the event of an asynchronous call on `stream`, at the end of its work. The event keeps `tensors`,
  // of memory of stream `current`. An empty event for the host.
  nb::object end(Device device, Stream stream, Stream current, std::vector<nb::object> tensors) const;

 private:
  Stream private_handle();

  nb::object private_stream_;
  Stream private_handle_{};
  Stream last_{};  // stream of the last call, if there was one
  bool any_ = false;
  StreamEvent order_;
};

// A call on the stream that CallStreams chooses, which is PyTorch's current stream until the call ends.
// Memory that the call allocates belongs to that stream.
class StreamedCall {
 public:
  StreamedCall(CallStreams& streams, Framework framework, Device device, const EventHandle* previous,
               bool async_finish);
  ~StreamedCall();
  StreamedCall(const StreamedCall&) = delete;
  StreamedCall& operator=(const StreamedCall&) = delete;

  Stream stream() const { return stream_; }
  // Ends the call, and returns its EventOverlap. `inputs`: tensors that the call reads; `outputs`: that it
  // has allocated.
  nb::object finish(std::vector<nb::object> inputs, const std::vector<nb::object>& outputs);

 private:
  void leave() noexcept;

  CallStreams& streams_;
  Device device_;
  bool async_finish_;
  Stream current_{}, stream_{};
  nb::object
      current_object_;  // PyTorch's object for current_; valid while the call runs on the private stream
  nb::object scope_;    // PyTorch's context that makes stream_ the current one
};

// An EventOverlap of the event, or for None of no event.
nb::object event_overlap(const nb::object& event);

// The event of an EventOverlap, or null: for None, an EventOverlap without one, and any other object.
const EventHandle* event_of(const nb::object& overlap);
bool is_event_overlap(const nb::object& object);

// PyTorch's current stream of the device.
Stream current_stream(Device device);

}  // namespace ferry::python
