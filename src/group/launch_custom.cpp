#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/system_error.hpp"
#include "base/text.hpp"
#include "group/launcher.hpp"
#include "memory/file_descriptor.hpp"
#include "memory/published_handle.hpp"

namespace ferry {

namespace {

// What the ranks tell one another when they first meet, before they share memory.
struct Card {
  int rank = -1;
  int process = 0;
  int descriptor = -1;                    // rank 0: of the memory that carries the group's control ...
  const GroupControl* control = nullptr;  // ... and where it has it mapped
  int error_number = 0;
  std::uint64_t process_space = 0;  // processes of another pid namespace cannot be reached by number
  char boot[40] = {};               // of this host's kernel: names the host beyond doubt
  char host[64] = {};               // for messages
};

// What rank 0 keeps open until everyone has joined it.
struct Home {
  Descriptor memory;
  std::optional<PublishedHandle<GroupControl>> offer;
};

std::uint64_t process_space() {
  struct stat status{};
  return stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

Card own_card(int rank) {
  Card card;
  card.rank = rank;
  card.process = getpid();
  card.process_space = process_space();
  std::ifstream("/proc/sys/kernel/random/boot_id").get(card.boot, sizeof card.boot);
  gethostname(card.host, sizeof card.host - 1);
  return card;
}

void check_hosts(const std::vector<Card>& cards) {
  std::set<std::string> hosts;
  bool together = true;
  for (const Card& card : cards) {
    together &= std::strcmp(card.boot, cards[0].boot) == 0 && card.process_space == cards[0].process_space;
    hosts.insert(card.host);
  }
  if (together) return;
  std::string names;
  for (const std::string& host : hosts) names += (names.empty() ? "" : ", ") + host;
  throw UnsupportedError(
      str("the ranks of a group share one host and one process namespace; these run on: ", names));
}

class CustomLauncher : public Group::Launcher {
 public:
  explicit CustomLauncher(Bootstrap bootstrap)
      : Launcher({1, bootstrap.ranks}), bootstrap_(std::move(bootstrap)) {}

  void run(const std::function<void(Rank)>& body) override { run_rank(meet(), bootstrap_.rank, body); }
  Rank join() override { return enter(meet(), bootstrap_.rank); }

 private:
  // Collective. Every rank throws if one of them cannot take part.
  std::shared_ptr<GroupControl> meet() const {
    Card mine = own_card(bootstrap_.rank);
    Home home;
    if (bootstrap_.rank == 0) open_home(home, mine);
    const std::vector<Card> cards = exchange_cards(mine);
    check_hosts(cards);
    if (cards[0].error_number != 0)
      throw system_error("rank 0 cannot make the group's shared memory", cards[0].error_number);

    std::shared_ptr<GroupControl> control;
    int error = 0;
    try {
      control = join(cards[0]);
    } catch (const SystemError& refused) {
      error = refused.error_number;
    }
    std::vector<int> errors(ranks());
    bootstrap_.all_gather(&error, errors.data(), sizeof error);
    for (int rank = 0; rank < ranks(); ++rank) {
      if (errors[rank] != 0)
        throw system_error(str("rank ", rank, " cannot open the group's shared memory"), errors[rank]);
    }
    bootstrap_.barrier();
    return control;
  }

  std::vector<Card> exchange_cards(const Card& mine) const {
    std::vector<Card> cards(ranks());
    bootstrap_.all_gather(&mine, cards.data(), sizeof mine);
    for (int rank = 0; rank < ranks(); ++rank) {
      if (cards[rank].rank == rank) continue;
      throw UsageError(
          str("Bootstrap::all_gather put rank ", cards[rank].rank, " at the place of rank ", rank));
    }
    return cards;
  }

  void open_home(Home& home, Card& card) const {
    home.memory = Descriptor(memfd_create("ferry", MFD_CLOEXEC));
    if (!home.memory.valid() || ftruncate(home.memory.number(), GroupControl::bytes(ranks())) != 0) {
      card.error_number = errno;
      return;
    }
    try {
      home.offer.emplace(map_control(home.memory));
    } catch (const SystemError& refused) {
      card.error_number = refused.error_number;
      return;
    }
    card.descriptor = home.memory.number();
    card.control = home.offer->address();
  }

  std::shared_ptr<GroupControl> map_control(const Descriptor& memory) const {
    return std::make_shared<GroupControl>(Mapping::file(memory.number(), GroupControl::bytes(ranks())),
                                          ranks());
  }

  // Threads of rank 0's process use its mapping: the thread sanitizer follows addresses, not pages.
  std::shared_ptr<GroupControl> join(const Card& owner) const {
    auto control = owner.process == getpid()
                       ? PublishedHandle<GroupControl>::take(owner.control)
                       : map_control(Descriptor::of_process(owner.process, owner.descriptor));
    if (!control) throw system_error("rank 0 has given up", ESRCH);
    control->enter(bootstrap_.rank);  // so that a rank which dies from here on is noticed
    return control;
  }

  Bootstrap bootstrap_;
};

}  // namespace

std::shared_ptr<Group::Launcher> launch_custom(Bootstrap bootstrap) {
  return std::make_shared<CustomLauncher>(std::move(bootstrap));
}

}  // namespace ferry
