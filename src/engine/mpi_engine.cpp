#include "engine/mpi_engine.hpp"

#include <atomic>
#include <exception>

#include "base/callback_thread.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"
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

}  // namespace ferry
