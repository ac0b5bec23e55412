// Group.processes: ranks are forks of this interpreter, and send what they return or raise back to it.
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <optional>

#include "base/descriptors.hpp"
#include "base/errors.hpp"
#include "base/text.hpp"
#include "casters.hpp"
#include "ferry/error.hpp"
#include "group.hpp"
#include "group/launcher.hpp"
#include "interpreter.hpp"
#include "process_owner.hpp"

namespace nb = nanobind;

namespace ferry::python {

namespace {

void flush_output() {
  for (const char* name : {"stdout", "stderr"}) {
    const nb::object stream = nb::module_::import_("sys").attr(name);
    if (!stream.is_none()) stream.attr("flush")();
  }
}

// fork() as os.fork() does it: with the GIL, and with what the interpreter does before and after. A child
// would write buffered output again.
pid_t fork_interpreter() {
  const GilAcquire lock;
  flush_output();
  PyOS_BeforeFork();
  const pid_t process = fork();
  if (process == 0) {
    PyOS_AfterFork_Child();
  } else {
    PyOS_AfterFork_Parent();
  }
  return process;
}

// Where the process of a rank leaves what it has returned or raised, pickled.
class Outcome {
 public:
  Outcome() : file_(memfd_create("ferry-outcome", MFD_CLOEXEC)) {
    if (!file_.valid()) throw system_error("cannot create a file in memory for a rank's result", errno);
  }

  // `traceback`: of an exception, as text; None if the rank has returned.
  void write(const nb::object& value, const nb::object& traceback = nb::none()) const {
    const double now = nb::cast<double>(nb::module_::import_("time").attr("monotonic")());
    const nb::bytes pickled(
        nb::module_::import_("pickle").attr("dumps")(nb::make_tuple(traceback, now, value)));
    const char* data = pickled.c_str();
    for (std::size_t done = 0; done < pickled.size();) {
      const ssize_t bytes = ::write(file_.number(), data + done, pickled.size() - done);
      if (bytes < 0 && errno != EINTR) throw system_error("cannot write a rank's result", errno);
      if (bytes > 0) done += static_cast<std::size_t>(bytes);
    }
  }

  // (traceback, time, value); nothing if the process has left none.
  std::optional<nb::tuple> read() const {
    const off_t bytes = lseek(file_.number(), 0, SEEK_END);
    if (bytes <= 0) return std::nullopt;
    std::string pickled(static_cast<std::size_t>(bytes), '\0');
    for (std::size_t done = 0; done < pickled.size();) {
      const ssize_t read =
          pread(file_.number(), pickled.data() + done, pickled.size() - done, static_cast<off_t>(done));
      if (read <= 0 && errno != EINTR) throw system_error("cannot read a rank's result", errno);
      if (read > 0) done += static_cast<std::size_t>(read);
    }
    return nb::cast<nb::tuple>(
        nb::module_::import_("pickle").attr("loads")(nb::bytes(pickled.data(), pickled.size())));
  }

 private:
  FileDescriptor file_;
};

// A loss is thrown as the library's own error: of its records run() chooses that of the process that died.
void throw_if_peer_lost(const nb::handle& exception) {
  if (!nb::isinstance(exception, nb::module_::import_("ferry.error").attr("PeerLostError"))) return;
  const nb::object found = exception.attr("record");
  WaitRecord record;
  if (!found.is_none()) {
    record.rank = nb::cast<int>(found.attr("rank"));
    record.peer = nb::cast<int>(found.attr("peer"));
  }
  throw PeerLostError(nb::cast<std::string>(nb::str(exception)), record);
}

// The exception, or one with its text if it cannot be sent by pickle. A class whose __init__ takes other
// arguments than it passes on is pickled, but not loaded.
nb::object sendable(const nb::object& exception) {
  const nb::module_ pickle = nb::module_::import_("pickle");
  try {
    pickle.attr("loads")(pickle.attr("dumps")(exception));
    return exception;
  } catch (const nb::python_error& error) {
    const nb::object lines =
        nb::module_::import_("traceback").attr("format_exception_only")(exception.type(), exception);
    const auto text = nb::cast<std::string>(nb::str("").attr("join")(lines).attr("rstrip")());
    const auto why = nb::cast<std::string>(nb::str(error.value()));
    return nb::module_::import_("builtins")
        .attr("RuntimeError")(str(text, " (pickle cannot send this exception: ", why, ")"));
  }
}

nb::object traceback_of(const nb::handle& exception) {
  const nb::object lines =
      nb::module_::import_("traceback")
          .attr("format_exception")(exception.type(), exception, exception.attr("__traceback__"));
  return nb::str("").attr("join")(lines).attr("rstrip")();
}

void run_rank(const Rank& rank, const nb::callable& body, const Outcome& outcome) {
  const int process = this_process();
  with_gil([&] {
    try {
      const nb::object result = body(PyRank{rank, process});
      // A process that the body has forked, and that ends it too, leaves nothing.
      if (this_process() == process) outcome.write(result);
      flush_output();
    } catch (nb::python_error& error) {
      if (this_process() == process)
        outcome.write(sendable(nb::borrow(error.value())), traceback_of(error.value()));
      flush_output();
      throw_if_peer_lost(error.value());
      throw;
    }
  });
}

// Raises the exception that a rank raised first. Returns if none has left one.
void raise_first(const std::vector<Outcome>& outcomes) {
  nb::object first;
  std::string first_traceback;
  int first_rank = -1;
  double first_time = 0;
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    const std::optional<nb::tuple> left = outcomes[rank].read();
    if (!left || (*left)[0].is_none()) continue;
    const auto time = nb::cast<double>((*left)[1]);
    if (first.is_valid() && time >= first_time) continue;
    first = (*left)[2];
    first_traceback = nb::cast<std::string>((*left)[0]);
    first_time = time;
    first_rank = static_cast<int>(rank);
  }
  if (!first.is_valid()) return;
  note_rank(first, first_rank, first_traceback);
  PyErr_SetObject(first.type().ptr(), first.ptr());
  throw nb::python_error();
}

}  // namespace

PyGroup make_processes(const Ranks& ranks, int nodes) {
  const auto start = [](const Topology& topology) {
    return Group(launch_processes(topology, fork_interpreter));
  };
  return PyGroup(start(topology_of(ranks, nodes)), MemoryKind::host, Starts::processes);
}

std::vector<nb::object> run_processes(Group group, const nb::callable& body) {
  const std::vector<Outcome> outcomes(static_cast<std::size_t>(group.size()));
  try {
    const GilRelease unlocked;
    group.run(
        [&](const Rank& rank) { run_rank(rank, body, outcomes[static_cast<std::size_t>(rank.index())]); });
  } catch (const Error&) {
    throw;  // such as a process that was killed, or an interrupt
  } catch (const std::runtime_error&) {
    raise_first(outcomes);
    throw;
  }
  std::vector<nb::object> results;
  for (const Outcome& outcome : outcomes) {
    const std::optional<nb::tuple> left = outcome.read();
    results.push_back(left ? nb::object((*left)[2]) : nb::none());
  }
  return results;
}

}  // namespace ferry::python
