#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
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
#include "memory/descriptor_socket.hpp"
#include "memory/published_handle.hpp"

namespace ferry {

namespace {

// What the ranks tell one another when they first meet, before they share memory.
struct Card {
  int rank = -1;
  int process = 0;
  SocketAddress socket = {};              // where the rank receives the file of the group's control memory
  const GroupControl* control = nullptr;  // rank 0: its mapping of that memory
  int error_number = 0;
  std::uint64_t process_space = 0;  // pid namespace: ranks watch one another by process number
  std::uint64_t network_space = 0;  // network namespace: sockets of another one cannot be reached
  char boot[40] = {};               // of this host's kernel: names the host beyond doubt
  char host[64] = {};               // for messages
};

// What rank 0 keeps open until everyone has joined it.
struct Home {
  Descriptor memory;
  std::optional<PublishedHandle<GroupControl>> offer;
};

// `path`: of a namespace of this process.
std::uint64_t namespace_number(const char* path) {
  struct stat status{};
  return stat(path, &status) == 0 ? status.st_ino : 0;
}

Card own_card(int rank) {
  Card card;
  card.rank = rank;
  card.process = getpid();
  card.process_space = namespace_number("/proc/self/ns/pid");
  card.network_space = namespace_number("/proc/self/ns/net");
  std::ifstream("/proc/sys/kernel/random/boot_id").get(card.boot, sizeof card.boot);
  gethostname(card.host, sizeof card.host - 1);
  return card;
}

void check_hosts(const std::vector<Card>& cards) {
  std::set<std::string> hosts;
  bool together = true;
  for (const Card& card : cards) {
    together &= std::strcmp(card.boot, cards[0].boot) == 0 && card.process_space == cards[0].process_space &&
                card.network_space == cards[0].network_space;
    hosts.insert(card.host);
  }
  if (together) return;
  std::string names;
  for (const std::string& host : hosts) names += (names.empty() ? "" : ", ") + host;
  throw UnsupportedError(str(
      "the ranks of a group share one host and one process namespace and network namespace; these run on: ",
      names));
}

constexpr int kRetryMs = 10;

// Also true for a process that has ended and is not reaped yet.
bool has_ended(int process) {
  const Descriptor descriptor(static_cast<int>(syscall(SYS_pidfd_open, process, 0)));
  if (!descriptor.valid()) return errno == ESRCH;
  pollfd entry{descriptor.number(), POLLIN, 0};
  return poll(&entry, 1, 0) > 0;
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
    std::optional<DescriptorSocket> socket;
    try {
      mine.socket = socket.emplace().address();
    } catch (const SystemError& refused) {
      mine.error_number = refused.error_number;
    }
    Home home;
    if (bootstrap_.rank == 0) open_home(home, mine);
    const std::vector<Card> cards = exchange_cards(mine);
    check_hosts(cards);
    for (const Card& card : cards) {
      if (card.error_number == 0) continue;
      throw system_error(
          str("rank ", card.rank, " cannot make the group's shared memory or a socket to share it"),
          card.error_number);
    }

    std::shared_ptr<GroupControl> control;
    int error = 0;
    try {
      if (bootstrap_.rank == 0) send_control(*socket, home.memory, cards);
      control = join(*socket, cards[0]);
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
    home.memory = Descriptor(memfd_create("ferry", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    // Sealed: no rank can truncate the file under the mappings of the others.
    if (!home.memory.valid() || ftruncate(home.memory.number(), GroupControl::bytes(ranks())) != 0 ||
        fcntl(home.memory.number(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
      card.error_number = errno;
      return;
    }
    try {
      home.offer.emplace(map_control(home.memory));
    } catch (const SystemError& refused) {
      card.error_number = refused.error_number;
      return;
    }
    card.control = home.offer->address();
  }

  std::shared_ptr<GroupControl> map_control(const Descriptor& memory) const {
    return std::make_shared<GroupControl>(Mapping::file(memory.number(), GroupControl::bytes(ranks())),
                                          ranks());
  }

  // Rank 0: sends the control memory's file to the ranks of other processes. A rank that has died is skipped,
  // so that the others do not wait for the file in vain.
  static void send_control(const DescriptorSocket& socket, const Descriptor& memory,
                           const std::vector<Card>& cards) {
    int dead = -1;
    for (const Card& card : cards) {
      if (card.process == getpid()) continue;
      // A send fails while the receiver's queue is full.
      while (!socket.send(card.socket, 0, memory)) {
        if (has_ended(card.process)) {
          dead = card.rank;
          break;
        }
        socket.wait(kRetryMs);
      }
    }
    if (dead >= 0) throw system_error(str("rank ", dead, " has ended"), ESRCH);
  }

  static Descriptor receive_control(const DescriptorSocket& socket, const Card& owner) {
    while (true) {
      if (auto message = socket.receive()) {
        if (message->file.valid()) return std::move(message->file);
        throw system_error("cannot have more files open", EMFILE);
      }
      if (has_ended(owner.process)) throw system_error("rank 0 has ended", ESRCH);
      socket.wait(kRetryMs);
    }
  }

  // Threads of rank 0's process use its mapping: the thread sanitizer follows addresses, not pages.
  std::shared_ptr<GroupControl> join(const DescriptorSocket& socket, const Card& owner) const {
    auto control = owner.process == getpid() ? PublishedHandle<GroupControl>::take(owner.control)
                                             : map_control(receive_control(socket, owner));
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
