#include "group.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <cstring>

#include "bindings.hpp"
#include "config.hpp"
#include "interrupt.hpp"
#include "process_owner.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ferry::python {
namespace {

// Python's functions as Bootstrap wants them. They are called, copied and dropped without the interpreter's
// lock.
std::shared_ptr<nb::object> locked(const nb::callable& function) {
  return {new nb::object(function), [](nb::object* object) {
            const nb::gil_scoped_acquire lock;
            delete object;
          }};
}

void gather(const nb::object& function, int ranks, const void* mine, void* all, std::size_t bytes) {
  const nb::gil_scoped_acquire lock;
  const nb::object gathered = function(nb::bytes(mine, bytes));
  const auto wrong = [&](const std::string& got) {
    throw UsageError(str("all_gather: expected a list of ", ranks, " bytes objects of ", bytes,
                         " bytes each, by rank, got ", got));
  };
  if (!nb::isinstance<nb::sequence>(gathered)) wrong("no list");
  auto* to = static_cast<std::byte*>(all);
  int count = 0;  // of what it gives: its length is what it says
  for (nb::handle part : gathered) {
    if (++count > ranks) wrong(str("a list of more than ", ranks));
    nb::bytes bytes_of_rank;
    if (!nb::try_cast(nb::borrow(part), bytes_of_rank)) wrong("something that is no bytes object");
    if (bytes_of_rank.size() != bytes) wrong(str("one of ", bytes_of_rank.size(), " bytes"));
    std::memcpy(to, bytes_of_rank.data(), bytes);
    to += bytes;
  }
  if (count < ranks) wrong(str("a list of ", count));
}

PyGroup custom(int rank, int ranks, const nb::callable& all_gather, const nb::callable& barrier,
               const std::string& default_backend) {
  Bootstrap bootstrap{.rank = rank, .ranks = ranks, .all_gather = {}, .barrier = {}};
  bootstrap.all_gather = [function = locked(all_gather), ranks](const void* mine, void* all,
                                                                std::size_t bytes) {
    gather(*function, ranks, mine, all, bytes);
  };
  bootstrap.barrier = [function = locked(barrier)] {
    const nb::gil_scoped_acquire lock;
    (*function)();
  };
  return PyGroup(Group::custom(std::move(bootstrap)), backend_named(default_backend));
}

std::vector<nb::bytes> all_gather(const PyRank& self, const nb::bytes& mine) {
  const Rank& rank = self.own();
  const std::uint64_t bytes = mine.size();
  const auto ranks = static_cast<std::size_t>(rank.size());
  std::vector<std::uint64_t> lengths(ranks);
  std::vector<char> all(bytes * ranks);
  {
    const nb::gil_scoped_release unlocked;
    rank.all_gather(&bytes, lengths.data(), sizeof bytes);
    for (std::size_t peer = 1; peer < ranks; ++peer) {
      if (lengths[peer] == lengths[0]) continue;
      throw UsageError(str("all_gather: rank 0 gives ", lengths[0], " bytes and rank ", peer, " gives ",
                           lengths[peer], ", all must give equally many"));
    }
    rank.all_gather(mine.data(), all.data(), bytes);
  }
  std::vector<nb::bytes> parts;
  for (int peer = 0; peer < rank.size(); ++peer) parts.emplace_back(all.data() + peer * bytes, bytes);
  return parts;
}

}  // namespace

const Rank& PyRank::own() const {
  require_own_process("rank", process);
  return rank;
}

PyGroup::PyGroup(Group group, BackendKind backend, bool starts_threads)
    : group_(std::move(group)),
      backend_(backend),
      starts_threads_(starts_threads),
      process_(this_process()) {}

std::vector<nb::object> PyGroup::run(const nb::callable& body) {
  require_own_process("group", process_);
  std::vector<nb::object> results(static_cast<std::size_t>(group_.size()));
  {
    const nb::gil_scoped_release unlocked;
    run_interruptibly(starts_threads_, [&](const StopWaiting& stop) {
      group_.run([&](const Rank& rank) {
        const StopWaiting::Heeded heeded(stop);
        const nb::gil_scoped_acquire lock;
        results[static_cast<std::size_t>(rank.index())] = body(PyRank{rank, this_process()});
      });
    });
  }
  std::erase_if(results, [](const nb::object& result) { return !result.is_valid(); });
  return results;
}

PyRank PyGroup::join() {
  require_own_process("group", process_);
  if (!joined_) {
    const nb::gil_scoped_release unlocked;
    joined_ = PyRank{group_.join(), process_};
  }
  return *joined_;
}

void bind_group(nb::module_& module) {
  nb::class_<PyRank>(module, "Rank", "One participant of a group. Use it from the thread it was given to.")
      .def_prop_ro(
          "index", [](const PyRank& self) { return self.own().index(); }, "0 to size - 1")
      .def_prop_ro(
          "size", [](const PyRank& self) { return self.own().size(); }, "ranks of the group")
      .def_prop_ro(
          "same_process", [](const PyRank& self) { return self.own().same_process(); },
          "whether every rank is a thread of this process")
      .def(
          "barrier",
          [](const PyRank& self) {
            const Rank& rank = self.own();
            const nb::gil_scoped_release unlocked;
            rank.barrier();
          },
          "Collective: returns when every rank has called. TimeoutError or PeerLostError when one does not.")
      .def("all_gather", &all_gather, "mine"_a,
           "Collective: the bytes of every rank, by rank; all give equally many, else each gets UsageError.")
      .def("__repr__",
           [](const PyRank& self) { return str("Rank(", self.rank.index(), " of ", self.rank.size(), ")"); });

  nb::class_<PyGroup>(module, "Group", "All ranks that work together, and how they find one another.")
      .def_static(
          "threads",
          [](int ranks, int nodes) { return PyGroup(Group::threads(ranks, nodes), BackendKind::cpu, true); },
          "ranks"_a, "nodes"_a = 1, "Ranks as threads of this process: run() starts them.")
      .def_static(
          "mpi", [] { return PyGroup(Group::mpi()); },
          "This process is one rank of an MPI job. UnsupportedError where the MPI module was not built.")
      .def_static(
          "custom", &custom, "rank"_a, "ranks"_a, "all_gather"_a, "barrier"_a, nb::kw_only(),
          "default_backend"_a = "cpu",
          "This process (or thread) is one rank, and brings the means to meet: all_gather(bytes) returns\n"
          "the bytes of every rank in a list, barrier() waits for all. Ranks share this host.")
      .def_static(
          "torch",
          [](const nb::object& process_group) {
            return nb::module_::import_("ferry._torch_group").attr("meet")(process_group);
          },
          "process_group"_a = nb::none(), nb::sig("def torch(process_group: object | None = None) -> Group"),
          "This process is one rank of a torch.distributed process group (default: the world's).")
      .def_prop_ro(
          "size", [](const PyGroup& self) { return self.group().size(); }, "ranks of the group")
      .def("run", &PyGroup::run, "body"_a,
           "Calls body(rank) as every rank this group starts (threads) or as this process's rank, and "
           "returns\n"
           "what the calls returned, in a list. An exception of a rank is raised here, and the others' waits "
           "end\n"
           "with PeerLostError. So do those of threads after Ctrl-C; it is raised when every body has ended.")
      .def("join", &PyGroup::join,
           "This process's rank, for groups that start none; Exchange(group, ...) calls it. The first call "
           "is\n"
           "collective.")
      .def("leave", &PyGroup::leave, "Gives the joined rank up; it leaves when no exchange uses it any more.")
      .def("set_deadline", &PyGroup::set_deadline, "seconds"_a,
           "How long collectives of the group itself wait; default 30.")
      .def("__repr__", [](const PyGroup& self) {
        return str("Group(", self.group().size(), self.group().size() == 1 ? " rank)" : " ranks)");
      });
}

}  // namespace ferry::python
