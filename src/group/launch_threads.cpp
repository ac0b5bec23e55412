#include <exception>
#include <system_error>
#include <thread>
#include <vector>

#include "base/text.hpp"
#include "group/launcher.hpp"

namespace ferry {

namespace {

class ThreadLauncher : public Group::Launcher {
 public:
  using Launcher::Launcher;

  void run(const std::function<void(Rank)>& body) override {
    const auto control =
        std::make_shared<GroupControl>(Mapping::anonymous_shared(GroupControl::bytes(ranks())), ranks());
    std::vector<std::exception_ptr> errors(ranks());
    std::vector<std::thread> threads;
    try {
      for (int rank = 0; rank < ranks(); ++rank) {
        threads.emplace_back([&, rank] {
          try {
            run_rank(control, rank, body);
          } catch (...) {
            errors[rank] = std::current_exception();
          }
        });
      }
    } catch (const std::system_error& error) {
      const int missing = static_cast<int>(threads.size());
      const SystemError reason(str("cannot start the thread of rank ", missing, ": ", error.what()),
                               error.code().value());
      control->lose(missing, ErrorRecord::of(reason), control->launcher());
      errors[missing] = std::make_exception_ptr(reason);
    }
    for (std::thread& thread : threads) thread.join();
    const int first = control->first_lost();
    if (first >= 0) std::rethrow_exception(errors[first]);
  }
};

}  // namespace

std::shared_ptr<Group::Launcher> launch_threads(Topology topology) {
  return std::make_shared<ThreadLauncher>(topology);
}

}  // namespace ferry
