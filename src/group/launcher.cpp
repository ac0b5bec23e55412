#include "group/launcher.hpp"

#include <exception>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/callback_thread.hpp"
#include "base/process.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"
#include "group/rendezvous.hpp"

namespace ferry {

void Group::Launcher::run_rank(Membership membership, const std::function<void(Rank)>& body) const {
  const std::shared_ptr<ControlBlock> control = membership.control;
  const int rank = membership.rank;
  const auto destroy = [](RankState* state) {
    if (state->in_own_process()) delete state;
  };
  try {
    body(Rank({new RankState(std::move(membership), deadline_, engine_), destroy}));
  } catch (...) {
    control->fail_rank(rank, ErrorRecord::of(std::current_exception()), rank);
    throw;
  }
  control->leave(rank);
}

std::string Group::Launcher::prefix_of(int rank, ErrorRecord::Kind kind) {
  const bool of_a_wait = kind == ErrorRecord::Kind::timeout || kind == ErrorRecord::Kind::peer_lost;
  return of_a_wait ? "" : str("rank ", rank, ": ");
}

Rank Group::Launcher::join() {
  throw UsageError("join: this group starts its ranks itself; use run(), which passes each rank to the body");
}

std::shared_ptr<RankState> Group::Launcher::join_as(Membership membership) const {
  const std::shared_ptr<ControlBlock> control = membership.control;
  const int rank = membership.rank;
  const auto leave = [control, rank](RankState* state) {
    if (!state->in_own_process()) return;
    delete state;
    control->leave(rank);
  };
  try {
    return {new RankState(std::move(membership), deadline_, engine_), leave};
  } catch (...) {
    control->fail_rank(rank, ErrorRecord::of(std::current_exception()), rank);
    throw;
  }
}

namespace {

// Group::threads: every rank is a thread of this process.
class ThreadLauncher : public Group::Launcher {
 public:
  explicit ThreadLauncher(Topology topology) : Launcher(topology.ranks()), topology_(std::move(topology)) {}

  void run(const std::function<void(Rank)>& body) override {
    const auto control =
        std::make_shared<ControlBlock>(Mapping::anonymous_shared(ControlBlock::bytes(ranks())), ranks());
    std::vector<std::exception_ptr> errors(ranks());
    std::vector<std::thread> threads;
    try {
      for (int rank = 0; rank < ranks(); ++rank) {
        threads.emplace_back([&, rank] {
          try {
            run_rank({control, rank, topology_}, body);
          } catch (...) {
            errors[rank] = std::current_exception();
          }
        });
      }
    } catch (const std::system_error& error) {
      const int not_started = static_cast<int>(threads.size());
      const SystemError reason(str("cannot start the thread of rank ", not_started, ": ", error.what()),
                               error.code().value());
      control->fail_rank(not_started, ErrorRecord::of(reason), control->launcher());
      errors[not_started] = std::make_exception_ptr(reason);
    }
    for (std::thread& thread : threads) thread.join();
    const int first_failed = control->first_failed_rank();
    if (first_failed >= 0) rethrow(first_failed, errors[first_failed]);
  }

 private:
  // As in a group of processes, an exception of a class that Ferry does not know becomes a
  // std::runtime_error.
  [[noreturn]] static void rethrow(int rank, const std::exception_ptr& error) {
    const ErrorRecord record = ErrorRecord::of(error);
    const std::string prefix = prefix_of(rank, record.kind);
    try {
      std::rethrow_exception(error);
    } catch (const Error& known) {
      record.raise_with(prefix + known.what());
    } catch (const std::exception& other) {
      std::throw_with_nested(std::runtime_error(prefix + other.what()));
    } catch (...) {
      std::throw_with_nested(std::runtime_error(prefix + record.text));
    }
  }

  Topology topology_;
};

}  // namespace

std::shared_ptr<Group::Launcher> launch_threads(Topology topology) {
  return std::make_shared<ThreadLauncher>(std::move(topology));
}

namespace {

// Group::custom and Group::mpi: this process, or thread, is one rank, and the others are found over a link.
class CustomLauncher : public Group::Launcher {
 public:
  CustomLauncher(Connection connection, std::shared_ptr<Engine> engine)
      : Launcher(connection.ranks, std::move(engine)), connection_(std::move(connection)) {}

  void run(const std::function<void(Rank)>& body) override { run_rank(rendezvous(), body); }

  Rank join() override {
    const std::shared_ptr<RankState> state = join_as(rendezvous());
    joined_ = state;
    return Rank(state);
  }

 private:
  // Collective over all ranks.
  Membership rendezvous() {
    if (process_ == 0) process_ = this_process();
    require_own_process("group", process_);
    CallbackScope::require_none("Group::run or Group::join");
    if (!joined_.expired()) {
      throw UsageError(
          str("rank ", connection_.rank, " is in the group already: use the handle that join() returned"));
    }
    std::unique_ptr<BootstrapLink> link = connection_.link();
    Meeting meeting = meet(*link, connection_.rank, connection_.ranks, connection_.host_id, deadline());
    if (connection_.joined != nullptr) connection_.joined(meeting.control);
    if (meeting.topology.nodes() == 1) link = nullptr;
    return {std::move(meeting.control), connection_.rank, std::move(meeting.topology), std::move(link)};
  }

  Connection connection_;
  int process_ = 0;  // the first process that joined; 0: none
  std::weak_ptr<RankState> joined_;
};

}  // namespace

std::shared_ptr<Group::Launcher> launch_custom(Connection connection, std::shared_ptr<Engine> engine) {
  return std::make_shared<CustomLauncher>(std::move(connection), std::move(engine));
}

}  // namespace ferry
