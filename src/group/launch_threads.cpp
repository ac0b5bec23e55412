// Group::threads: every rank is a thread of this process.
#include <exception>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/text.hpp"
#include "group/launcher.hpp"

namespace ferry {

namespace {

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

}  // namespace ferry
