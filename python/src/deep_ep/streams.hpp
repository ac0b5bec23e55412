// The streams and events of ferry.deep_ep: which stream a call runs on, and what it waits for.
#pragma once

#include "device.hpp"

namespace ferry::python {

// The Python class EventHandle: an event recorded on PyTorch's current stream when it is made. Empty without
// PyTorch or a GPU, where calls are synchronous.
struct EventHandle {
  StreamEvent event;

  // Makes PyTorch's current stream wait.
  void current_stream_wait() const;
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

  // The event at the end of the call's work. Empty for the host.
  static EventHandle end(Device device, Stream stream);

  // Keeps PyTorch from giving the tensor's memory to others before the private stream's work so far is done.
  void record_use(nb::handle tensor);

 private:
  Stream private_handle();

  nb::object private_stream_;
  Stream private_handle_{};
  Stream last_{};  // stream of the last call, if there was one
  bool any_ = false;
  StreamEvent order_;
};

// PyTorch's current stream of the device.
Stream current_stream(Device device);

}  // namespace ferry::python
