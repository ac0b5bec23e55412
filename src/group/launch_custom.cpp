// Group::custom and Group::mpi: this process, or thread, is one rank, and the others are found over a link.
#include <utility>

#include "base/callback_thread.hpp"
#include "base/process.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"
#include "group/launcher.hpp"
#include "group/rendezvous.hpp"

namespace ferry {

namespace {

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
