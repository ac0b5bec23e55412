// The engines of MPI and of the caller's functions, and the groups that bring them: Group::mpi and
// Group::custom.
#include "engine/engine.hpp"

#include <atomic>
#include <exception>
#include <utility>

#include "base/callback_thread.hpp"
#include "base/environment.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"
#include "ferry/group.hpp"
#include "group/launcher.hpp"
#include "group/mpi_library.hpp"

namespace ferry {
namespace {

const char* name_of(ferry_mpi_threads level) {
  switch (level) {
    case FERRY_MPI_THREAD_SINGLE:
      return "MPI_THREAD_SINGLE";
    case FERRY_MPI_THREAD_FUNNELED:
      return "MPI_THREAD_FUNNELED";
    case FERRY_MPI_THREAD_SERIALIZED:
      return "MPI_THREAD_SERIALIZED";
    case FERRY_MPI_THREAD_MULTIPLE:
      return "MPI_THREAD_MULTIPLE";
  }
  return "an unknown level";
}

class MpiCommunicator : public Communicator {
 public:
  explicit MpiCommunicator(int channel) : channel_(channel) {}

  void all_to_all_v(const AllToAllV& transfer, const std::shared_ptr<void>& keep,
                    const std::function<void()>& check) override {
    if (failure_) std::rethrow_exception(failure_);
    const ferry_mpi_transfer given{reinterpret_cast<const char*>(transfer.send),
                                   transfer.send_bytes.data(),
                                   transfer.send_offsets.data(),
                                   reinterpret_cast<char*>(transfer.receive),
                                   transfer.receive_bytes.data(),
                                   transfer.receive_offsets.data()};
    const auto start = [&](ferry_mpi_operation** operation, char* message) {
      return open_mpi().start_all_to_all_v(channel_, &given, operation, message);
    };
    try {
      run_mpi_operation(start, check);
    } catch (...) {
      failure_ = std::current_exception();
      keep_forever(keep);
      throw;
    }
  }

 private:
  const int channel_;
  std::exception_ptr failure_;
};

class MpiEngine : public Engine {
 public:
  EngineKind kind() const override { return EngineKind::mpi; }
  bool ordered_lanes() const override { return false; }

  std::vector<std::unique_ptr<Communicator>> communicators(int lanes) override {
    const ferry_mpi_threads level = open_mpi().threads;
    if (level < FERRY_MPI_THREAD_SERIALIZED) {
      throw UnsupportedError(
          str("the engine mpi calls MPI from several threads, but MPI was initialised with ", name_of(level),
              ": call MPI_Init_thread with MPI_THREAD_MULTIPLE, or with MPI_THREAD_SERIALIZED if the program "
              "makes no call of MPI while Ferry works; or let Group::mpi() initialise MPI"));
    }
    // Shared by all groups of the process, because they share a communicator of MPI.
    static std::atomic<int> next_channel = 0;
    std::vector<std::unique_ptr<Communicator>> made;
    for (int i = 0; i < lanes; ++i) made.push_back(std::make_unique<MpiCommunicator>(next_channel++));
    return made;
  }
};

}  // namespace

std::shared_ptr<Engine> make_mpi_engine() {
  open_mpi();
  return std::make_shared<MpiEngine>();
}

namespace {

class CustomCommunicator : public Communicator {
 public:
  CustomCommunicator(std::shared_ptr<CallbackThread> thread, std::shared_ptr<const EngineFunctions> functions,
                     int lane)
      : thread_(std::move(thread)), functions_(std::move(functions)), lane_(lane) {}

  void all_to_all_v(const AllToAllV& transfer, const std::shared_ptr<void>& keep,
                    const std::function<void()>& check) override {
    CallbackScope::require_none("an operation on the same engine");
    const auto list = [](std::span<const std::int64_t> values) {
      return std::vector<std::int64_t>(values.begin(), values.end());
    };
    thread_->run(
        "the engine's function all_to_all_v",
        [functions = functions_, lane = lane_, keep, send = transfer.send, receive = transfer.receive,
         send_bytes = list(transfer.send_bytes), send_offsets = list(transfer.send_offsets),
         receive_bytes = list(transfer.receive_bytes), receive_offsets = list(transfer.receive_offsets)] {
          functions->all_to_all_v(lane, send, send_bytes.data(), send_offsets.data(), receive,
                                  receive_bytes.data(), receive_offsets.data());
        },
        check);
  }

 private:
  std::shared_ptr<CallbackThread> thread_;
  std::shared_ptr<const EngineFunctions> functions_;  // shared with abandoned calls
  int lane_;
};

class CustomEngine : public Engine {
 public:
  explicit CustomEngine(EngineFunctions functions)
      : functions_(std::make_shared<const EngineFunctions>(std::move(functions))) {}

  EngineKind kind() const override { return EngineKind::custom; }
  bool ordered_lanes() const override { return functions_->ordered_lanes; }
  bool takes_device_memory() const override { return functions_->device_memory; }

  // Threads start here and not with the engine: a program may fork its ranks after it has made the group.
  std::vector<std::unique_ptr<Communicator>> communicators(int lanes) override {
    std::vector<std::unique_ptr<Communicator>> made;
    for (int i = 0; i < lanes; ++i) {
      if (!functions_->ordered_lanes || !thread_)
        thread_ = std::make_shared<CallbackThread>(functions_->abort);
      made.push_back(std::make_unique<CustomCommunicator>(thread_, functions_, next_lane_++));
    }
    return made;
  }

 private:
  std::shared_ptr<const EngineFunctions> functions_;
  std::shared_ptr<CallbackThread>
      thread_;  // the thread of all lanes if they are ordered; else of the last lane
  int next_lane_ = 0;
};

}  // namespace

std::shared_ptr<Engine> make_custom_engine(EngineFunctions functions) {
  if (!functions.all_to_all_v) throw UsageError("EngineFunctions::all_to_all_v must be set");
  if (functions.abort) {
    functions.abort = [abort = std::move(functions.abort), called = std::make_shared<std::atomic<bool>>()] {
      if (!called->exchange(true)) abort();
    };
  }
  return std::make_shared<CustomEngine>(std::move(functions));
}

Group Group::custom(Bootstrap bootstrap, EngineFunctions engine) {
  if (bootstrap.ranks < 1 || bootstrap.rank < 0 || bootstrap.rank >= bootstrap.ranks) {
    throw UsageError(
        str("rank ", bootstrap.rank, " does not exist in a group of ", counted(bootstrap.ranks, "rank")));
  }
  if (!bootstrap.all_gather || !bootstrap.barrier) {
    throw UsageError("Bootstrap::all_gather and Bootstrap::barrier must both be set");
  }
  const bool brings_engine = engine.all_to_all_v || engine.abort;
  const auto shared = std::make_shared<const Bootstrap>(std::move(bootstrap));
  return Group(launch_custom(
      {shared->rank, shared->ranks, shared->host_id.empty() ? Environment::read().host_id : shared->host_id,
       [shared] { return link_by_functions(shared); }},
      brings_engine ? make_custom_engine(std::move(engine)) : nullptr));
}

Group Group::mpi() {
  const ferry_mpi& mpi = open_mpi();
  return Group(launch_custom({mpi.rank, mpi.ranks, Environment::read().host_id, link_by_mpi, watch_mpi_group},
                             make_mpi_engine()));
}

}  // namespace ferry
