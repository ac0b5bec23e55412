#include "group.hpp"
#include "casters.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <tuple>

#include "base/enumerators.hpp"
#include "bindings.hpp"
#include "config.hpp"
#include "group/rank_state.hpp"
#include "interpreter.hpp"
#include "interrupt.hpp"
#include "process_owner.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ferry::python {
namespace {

// With the GIL, in the bootstrap's thread.
void gather(const SharedObject& function, int ranks, const void* mine, void* all, std::size_t bytes) {
  const nb::bytes part_of_this_rank(mine, bytes);
  const nb::object gathered = call_function(function, part_of_this_rank);
  const auto wrong = [&](const std::string& got) {
    throw UsageError(str("all_gather: expected a list of ", ranks, " bytes objects of ",
                         counted(bytes, "byte"), " each, by rank, got ", got));
  };
  if (!nb::isinstance<nb::sequence>(gathered)) wrong("something that is not a list");
  auto* to = static_cast<std::byte*>(all);
  int count = 0;  // counts the items: len() of a foreign sequence may be wrong
  for (nb::handle part : gathered) {
    if (++count > ranks) wrong(str("a list of more than ", ranks));
    nb::bytes bytes_of_rank;
    if (!nb::try_cast(nb::borrow(part), bytes_of_rank)) wrong("an item that is not a bytes object");
    if (bytes_of_rank.size() != bytes) wrong(str("an item of ", counted(bytes_of_rank.size(), "byte")));
    std::memcpy(to, bytes_of_rank.data(), bytes);
    to += bytes;
  }
  if (count < ranks) wrong(str("a list of ", count));
}

// Bytes from the start of a buffer to the end of the last part.
std::int64_t extent(int ranks, const std::int64_t* bytes, const std::int64_t* offsets) {
  std::int64_t most = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    if (bytes[rank] > 0) most = std::max(most, offsets[rank] + bytes[rank]);
  }
  return most;
}

// A view of memory that Ferry owns.
nb::object view_memory(const void* memory, std::int64_t bytes, int flags) {
  static char empty = 0;  // Python has no view of a null pointer
  char* start = bytes > 0 ? static_cast<char*>(const_cast<void*>(memory)) : &empty;
  return nb::steal(PyMemoryView_FromMemory(start, bytes, flags));
}

nb::list list_of(int ranks, const std::int64_t* values) {
  nb::list list;
  for (int rank = 0; rank < ranks; ++rank) list.append(values[rank]);
  return list;
}

EngineFunctions make_engine(int ranks, const nb::callable& all_to_all_v,
                            const std::optional<nb::callable>& abort, bool ordered_lanes) {
  EngineFunctions engine;
  engine.all_to_all_v = [function = share(all_to_all_v), ranks](
                            int lane, const void* send, const std::int64_t* send_bytes,
                            const std::int64_t* send_offsets, void* receive,
                            const std::int64_t* receive_bytes, const std::int64_t* receive_offsets) {
    with_gil([&] {
      const nb::object from = view_memory(send, extent(ranks, send_bytes, send_offsets), PyBUF_READ);
      const nb::object to = view_memory(receive, extent(ranks, receive_bytes, receive_offsets), PyBUF_WRITE);
      call_function(function, nb::int_(lane), from, list_of(ranks, send_bytes), list_of(ranks, send_offsets),
                    to, list_of(ranks, receive_bytes), list_of(ranks, receive_offsets));
      try {
        from.attr("release")();
        to.attr("release")();
      } catch (nb::python_error& error) {
        if (!error.matches(PyExc_Exception)) throw;
        throw UsageError("all_to_all_v returned but still uses its memory: it must keep no array of it");
      }
    });
  };
  if (abort) {
    engine.abort = [function = share(*abort)] { with_gil([&] { call_function(function); }); };
  }
  engine.ordered_lanes = ordered_lanes;
  return engine;
}

PyGroup make_custom(int rank, int ranks, const nb::callable& all_gather, const nb::callable& barrier,
                    const std::optional<nb::callable>& all_to_all_v, const std::optional<nb::callable>& abort,
                    bool ordered_lanes, const std::string& default_memory, const std::string& host_id) {
  Bootstrap bootstrap{.rank = rank, .ranks = ranks, .all_gather = {}, .barrier = {}, .host_id = host_id};
  bootstrap.all_gather = [function = share(all_gather), ranks](const void* mine, void* all,
                                                               std::size_t bytes) {
    with_gil([&] { gather(function, ranks, mine, all, bytes); });
  };
  bootstrap.barrier = [function = share(barrier)] { with_gil([&] { call_function(function); }); };
  if (abort && !all_to_all_v) throw UsageError("abort needs all_to_all_v, which it aborts");
  EngineFunctions engine;
  if (all_to_all_v) engine = make_engine(ranks, *all_to_all_v, abort, ordered_lanes);
  return PyGroup(Group::custom(std::move(bootstrap), std::move(engine)),
                 enumerator_named<MemoryKind>("default_memory", default_memory));
}

std::vector<nb::bytes> all_gather(const PyRank& self, const nb::bytes& mine) {
  const Rank& rank = self.checked();
  const std::uint64_t bytes = mine.size();
  const auto ranks = static_cast<std::size_t>(rank.size());
  std::vector<std::uint64_t> lengths(ranks);
  std::vector<char> all(bytes * ranks);
  {
    const GilRelease unlocked;
    rank.all_gather(&bytes, lengths.data(), sizeof bytes);
    for (std::size_t peer = 1; peer < ranks; ++peer) {
      if (lengths[peer] == lengths[0]) continue;
      throw UsageError(str("all_gather: every rank must pass the same number of bytes; rank 0 passes ",
                           lengths[0], ", rank ", peer, " passes ", lengths[peer]));
    }
    rank.all_gather(mine.data(), all.data(), bytes);
  }
  std::vector<nb::bytes> parts;
  for (int peer = 0; peer < rank.size(); ++peer) parts.emplace_back(all.data() + peer * bytes, bytes);
  return parts;
}

}  // namespace

const Rank& PyRank::checked() const {
  require_own_process("rank", process);
  return rank;
}

PyGroup::PyGroup(Group group, MemoryKind memory, Starts starts)
    : group_(std::move(group)), memory_(memory), starts_(starts), process_(this_process()) {}

void note_rank(const nb::handle& exception, int rank, const std::string& traceback) {
  if (!nb::hasattr(exception, "add_note")) return;
  exception.attr("add_note")(str("raised by rank ", rank, traceback.empty() ? "" : ":\n", traceback));
}

std::vector<nb::object> PyGroup::run(const nb::callable& body) {
  require_own_process("group", process_);
  if (starts_ == Starts::processes) return run_processes(group_, body);
  // By rank. Shared with ranks that an interrupted run() has left behind.
  const SharedObject results = share(nb::dict());
  const auto run_rank = [results, body = share(body)](StopRequest& request, const Rank& rank) {
    const StopRequest::Scope scope(request);
    with_gil([&] {
      const StopRequest::PythonThread thread(request);
      const nb::object handle = nb::cast(PyRank{rank, this_process()});
      try {
        nb::borrow<nb::dict>(results.get())[nb::int_(rank.index())] = call_function(body, handle);
      } catch (nb::python_error& error) {
        note_rank(error.value(), rank.index());
        throw;
      }
    });
  };
  try {
    const GilRelease unlocked;
    run_interruptibly(starts_ == Starts::threads, [group = group_, run_rank](StopRequest& request) mutable {
      group.run([&](const Rank& rank) { run_rank(request, rank); });
    });
  } catch (const std::runtime_error& error) {
    std::rethrow_if_nested(error);  // the Python exception of a rank
    throw;
  }
  std::vector<nb::object> returned;
  for (int rank = 0; rank < group_.size(); ++rank) {
    if (PyObject* const result = PyDict_GetItem(results.get(), nb::int_(rank).ptr()))
      returned.push_back(nb::borrow(result));
  }
  return returned;
}

PyRank PyGroup::join() {
  require_own_process("group", process_);
  if (!joined_) {
    const GilRelease unlocked;
    joined_ = PyRank{group_.join(), process_};
  }
  return *joined_;
}

namespace {

// The value, if it is in [0, count).
int checked_index(const char* name, int value, int count) {
  if (value < 0 || value >= count) throw UsageError(str(name, " = ", value, ", must be 0 to ", count - 1));
  return value;
}

void bind_topology(nb::module_& module) {
  nb::class_<Topology>(
      module, "Topology",
      "The nodes of a group: sets of ranks that share memory, numbered in the order of their "
      "lowest ranks.")
      .def(
          "__init__",
          [](Topology* self, const std::vector<int>& node_of_rank) {
            if (node_of_rank.empty()) throw UsageError("Topology: node_of_rank is empty");
            new (self) Topology(node_of_rank);
          },
          "node_of_rank"_a,
          "`node_of_rank` [R]: ranks with equal numbers, which may be any, are on one node.")
      .def_prop_ro("ranks", &Topology::ranks, "Number of ranks in the group.")
      .def_prop_ro("nodes", &Topology::nodes, "Number of nodes.")
      .def_prop_ro("simulated", &Topology::simulated,
                   "Whether nodes stand for hosts that the ranks do not really run on.")
      .def(
          "node_of",
          [](const Topology& self, int rank) {
            return self.node_of(checked_index("rank", rank, self.ranks()));
          },
          "rank"_a, "The node of a rank.")
      .def(
          "local_rank_of",
          [](const Topology& self, int rank) {
            return self.local_rank_of(checked_index("rank", rank, self.ranks()));
          },
          "rank"_a, "The rank's number among the ranks of its node, from 0.")
      .def(
          "ranks_of",
          [](const Topology& self, int node) {
            return self.ranks_of(checked_index("node", node, self.nodes()));
          },
          "node"_a, "The ranks of a node, in increasing order.")
      .def(
          "relay_of",
          [](const Topology& self, int source, int node) {
            return self.relay_of(checked_index("source", source, self.ranks()),
                                 checked_index("node", node, self.nodes()));
          },
          "source"_a, "node"_a,
          "The rank of `node` that passes on what rank `source` and the node send each other in two hops.")
      .def(
          "__getstate__",
          [](const Topology& self) {
            std::vector<int> node_of;
            for (int rank = 0; rank < self.ranks(); ++rank) node_of.push_back(self.node_of(rank));
            return std::make_tuple(node_of, self.simulated());
          },
          nb::sig("def __getstate__(self) -> tuple[list[int], bool]"))
      .def(
          "__setstate__",
          [](Topology* self, const std::tuple<std::vector<int>, bool>& state) {
            new (self) Topology(std::get<0>(state), std::get<1>(state));
          },
          nb::sig("def __setstate__(self, state: tuple[list[int], bool], /) -> None"))
      .def("__repr__", [](const Topology& self) {
        return str("Topology(", counted(self.ranks(), "rank"), " on ",
                   counted(self.nodes(), self.simulated() ? "simulated node" : "node"), ")");
      });
}

}  // namespace

Topology topology_of(const Ranks& ranks, int nodes) {
  if (const int* count = std::get_if<int>(&ranks)) return Topology::blocks(*count, nodes, nodes > 1);
  const auto& given = std::get<Topology>(ranks);
  if (nodes != 1)
    throw UsageError(str("nodes = ", nodes, " with a Topology, which has nodes of its own: pass none"));
  std::vector<int> node_of;
  for (int rank = 0; rank < given.ranks(); ++rank) node_of.push_back(given.node_of(rank));
  return Topology(node_of, given.nodes() > 1);
}

void bind_group(nb::module_& module) {
  bind_topology(module);
  nb::class_<PyRank> rank_class(module, "Rank",
                                "One participant of a group. Use it only in the thread that received it.");
  share_between_copies(rank_class, "Rank");
  rank_class
      .def_prop_ro(
          "index", [](const PyRank& self) { return self.checked().index(); },
          "This rank's number, 0 to size - 1.")
      .def_prop_ro(
          "size", [](const PyRank& self) { return self.checked().size(); }, "Number of ranks in the group.")
      .def_prop_ro(
          "same_process", [](const PyRank& self) { return self.checked().same_process(); },
          "Whether every rank of the group is a thread of this process.")
      .def_prop_ro(
          "topology", [](const PyRank& self) { return Topology(self.checked().topology()); },
          "Which ranks are on which node.")
      .def_prop_ro(
          "shares_memory", [](const PyRank& self) { return self.checked().state().one_host(); },
          "Whether all ranks share memory, as the backends 'cpu' and 'cuda' need; also on nodes that the "
          "group "
          "simulates in one process.")
      .def(
          "barrier",
          [](const PyRank& self) {
            const Rank& rank = self.checked();
            const GilRelease unlocked;
            rank.barrier();
          },
          "Blocks until every rank has called it. Collective. Raises TimeoutError or PeerLostError if one "
          "does not.")
      .def(
          "all_gather", &all_gather, "mine"_a,
          "Returns the bytes of every rank, by rank. Collective. UsageError on every rank if lengths differ.")
      .def("__repr__",
           [](const PyRank& self) { return str("Rank(", self.rank.index(), " of ", self.rank.size(), ")"); });

  nb::class_<PyGroup> group_class(module, "Group",
                                  "The ranks that work together, and how they find each other.");
  share_between_copies(group_class, "Group");
  group_class
      .def_static(
          "threads",
          [](const Ranks& ranks, int nodes) {
            return PyGroup(Group::threads(topology_of(ranks, nodes)), MemoryKind::host, Starts::threads);
          },
          "ranks"_a, "nodes"_a = 1,
          "Ranks are threads of this process; run() starts them. `nodes` simulates nodes of equal size, a "
          "Topology "
          "in place of the number of ranks nodes of any sizes.")
      .def_static(
          "processes", &make_processes, "ranks"_a, "nodes"_a = 1,
          R"(Ranks are processes on this host, forked by run(), which sends back what they return or raise by pickle.

Call run() before the program starts threads or uses a GPU. What a rank writes to variables stays in its process.)")
      .def_static(
          "mpi",
          [] {
            const GilRelease unlocked;  // starting MPI waits for the other ranks
            return PyGroup(Group::mpi());
          },
          "This process is one rank of an MPI job. UnsupportedError if the MPI module was not built.")
      .def_static(
          "launched", [] { return PyGroup(Group::launched()); },
          "This process is one rank of those that `ferry launch -n RANKS script.py` has started on this "
          "host. "
          "UsageError if it was started otherwise.")
      .def_static("custom", &make_custom, "rank"_a, "ranks"_a, "all_gather"_a, "barrier"_a, nb::kw_only(),
                  "all_to_all_v"_a = nb::none(), "abort"_a = nb::none(), "ordered_lanes"_a = true,
                  "default_memory"_a = "host", "host_id"_a = "",
                  R"(This process, or thread, is one rank; the caller supplies two collective functions.

all_gather(bytes) returns a list with the bytes of every rank, barrier() waits for all ranks. Ferry calls them on a
thread of its own; they must not call Ferry.
`default_memory`, 'host' or 'device', is where the arrays of exchanges are that name neither backend nor memory. `host_id`: any text; ranks with different texts are treated as
ranks of different hosts, in place of FERRY_HOST_ID.

The backend 'collective' moves rows through all_to_all_v(lane, send, send_bytes, send_offsets, receive, receive_bytes,
receive_offsets), which all ranks pass or none. It is collective: it sends send[o:o + n] with o = send_offsets[p] and
n = send_bytes[p] to each rank p, fills receive likewise, and returns when both may be used again. send and receive are
memoryviews of host memory that ends with the call: keep no array of it. The function runs on a thread of Ferry's, must
not call Ferry, and raises if it fails. abort() makes every blocked call of it raise. `lane` numbers the lanes of all exchanges of the group.
ordered_lanes=False: lanes may be called in another order on each rank, and from several threads at once.)")
      .def_static(
          "torch",
          [](const nb::object& process_group) {
            return nb::module_::import_("ferry._torch_group").attr("make_group")(process_group);
          },
          "process_group"_a = nb::none(), nb::sig("def torch(process_group: object | None = None) -> Group"),
          R"(This process is one rank of a torch.distributed process group; default: the default process group.

Collective: it makes process groups of its own, in which Ferry's collectives cannot mix with the program's. One of them
is the transport of the backend 'collective'. The default backend of exchanges is 'cuda' if the given process
group uses NCCL, else 'cpu'.)")
      .def_prop_ro(
          "size", [](const PyGroup& self) { return self.group().size(); }, "Number of ranks in the group.")
      .def(
          "run", &PyGroup::run, "body"_a,
          R"(Calls body(rank) on every rank that this group starts (threads, processes), or on this process's rank. Blocks.

Returns a list of what the calls returned. If a rank raises, the waits of the others end with PeerLostError, and run()
raises the rank's exception, with a note that names the rank and, for processes, holds its traceback. An exception of
a process that pickle cannot send becomes a RuntimeError with its text. After Ctrl-C the waits of threads end in the same
way, and run() raises KeyboardInterrupt once every thread has returned. A second Ctrl-C raises KeyboardInterrupt in the
Python code of the threads; run() leaves behind those that are inside a call that does not return within a second.)")
      .def("join", &PyGroup::join,
           R"(This process's rank, for groups that do not start their ranks. Exchange(group, ...) calls it.

The first call is collective and blocks. Raises UsageError for Group.threads() and Group.processes().)")
      .def("leave", &PyGroup::leave,
           "Gives up the joined rank, which leaves the group when no exchange uses it any more.")
      .def("set_deadline", &PyGroup::set_deadline, "seconds"_a,
           "Sets how long collectives of the group itself may wait; default: 30 s. Call it before join().")
      .def("__repr__", [](const PyGroup& self) {
        return str("Group(", self.group().size(), self.group().size() == 1 ? " rank)" : " ranks)");
      });
}

}  // namespace ferry::python
