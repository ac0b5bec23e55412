// The functions of NCCL that Ferry uses, between threads of one process and on host memory. A stream is a
// pointer to std::atomic<int>: the transfers that it still waits for. The process ends if NCCL's rules are
// broken.
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int kSuccess = 0, kSystemError = 2, kInProgress = 7;

struct UniqueId {
  char bytes[128];
};

// The first members of NCCL's.
struct Config {
  std::size_t size;
  unsigned magic, version;
  int blocking;
};

// A message that waits for its receiver.
struct Message {
  const void* data;
  std::size_t bytes;
  bool registered;
  std::atomic<bool> taken = false;
};

// The ranks of one communicator.
struct Meeting {
  int ranks = 0, arrived = 0, finalized = 0;
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::pair<int, int>, std::vector<std::shared_ptr<Message>>> messages;  // by sender and receiver
};

struct Comm {
  Comm(std::shared_ptr<Meeting> of, int number) : meeting(std::move(of)), rank(number) {}

  std::shared_ptr<Meeting> meeting;
  int rank;
  std::atomic<int> status = kSuccess;
  std::atomic<int> polls_in_progress = 0;
  std::atomic<bool> aborted = false;
  std::atomic<bool> finalizing = false;
  bool blocks = false;                                       // its calls return when they are done
  std::set<std::pair<const char*, const char*>> registered;  // guarded by the meeting's mutex
};

// Calls of all communicators, for fake_nccl_calls().
std::atomic<int> blocking, finalized, destroyed, aborted, registered_ever, registered_now, registered_sends,
    sends;

// Ends the process because NCCL's rules were broken.
[[noreturn]] void misuse(const char* what) {
  std::fprintf(stderr, "fake_nccl: %s\n", what);
  std::abort();
}

struct Operation {
  Comm* comm;
  bool sends;
  void* data;
  std::size_t bytes;
  int peer;
  std::atomic<int>* stream;
  bool registered;
};

// The group of a thread.
struct Group {
  std::vector<Operation> operations;
  int open = 0;
};

// Never freed: threads of abandoned transfers use them when the process ends.
struct Shared {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<Meeting>> meetings;
  std::vector<std::unique_ptr<Comm>> comms;
  std::map<std::thread::id, Group> groups;
};

Shared& shared() {
  static auto* const made = new Shared;
  return *made;
}

// Not thread_local: the thread sanitizer reports the memory of a library that was opened at run time.
Group& group_of_thread() {
  const std::lock_guard lock(shared().mutex);
  return shared().groups[std::this_thread::get_id()];
}

std::atomic<int> next_id = 1;

int number_in(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::atoi(text) : otherwise;
}

// Sends and receives what one group holds. Receiver and sender both wait until a message has been taken.
void carry_out(const std::vector<Operation>& operations) {
  std::vector<std::shared_ptr<Message>> sent;
  Comm* const comm = operations[0].comm;
  Meeting& meeting = *comm->meeting;
  const auto wait_for = [&](auto condition) {
    std::unique_lock lock(meeting.mutex);
    meeting.changed.wait(lock, [&] { return comm->aborted || condition(); });
    return !comm->aborted;
  };
  for (const Operation& each : operations) {
    if (!each.sends) continue;
    sent.push_back(std::make_shared<Message>());
    sent.back()->data = each.data;
    sent.back()->bytes = each.bytes;
    sent.back()->registered = each.registered;
    const std::lock_guard lock(meeting.mutex);
    meeting.messages[{comm->rank, each.peer}].push_back(sent.back());
    meeting.changed.notify_all();
  }
  for (const Operation& each : operations) {
    if (each.sends) continue;
    auto& waiting = [&]() -> auto& {
      const std::lock_guard lock(meeting.mutex);
      return meeting.messages[{each.peer, comm->rank}];
    }();
    if (!wait_for([&] { return !waiting.empty(); })) return;
    const std::lock_guard lock(meeting.mutex);
    const std::shared_ptr<Message> message = waiting.front();
    waiting.erase(waiting.begin());
    if (message->bytes != each.bytes) misuse("sender and receiver have another number of bytes");
    if (message->registered != each.registered) misuse("registered memory meets memory that is not");
    std::memcpy(each.data, message->data, each.bytes);
    message->taken = true;
    meeting.changed.notify_all();
  }
  for (const std::shared_ptr<Message>& message : sent) {
    if (!wait_for([&] { return message->taken.load(); })) return;
  }
}

// FAKE_NCCL_SEND_FAILS: the rank whose sends are refused.
int add(const Operation& operation) {
  if (operation.sends && number_in("FAKE_NCCL_SEND_FAILS", -1) == operation.comm->rank) return kSystemError;
  Comm& comm = *operation.comm;
  if (comm.finalizing || comm.aborted) misuse("a transfer of a communicator that has ended");
  Operation added = operation;
  {
    const std::lock_guard lock(comm.meeting->mutex);
    const auto* begin = static_cast<const char*>(operation.data);
    for (const auto& [first, end] : comm.registered)
      added.registered |= first <= begin && begin + operation.bytes <= end;
  }
  if (added.sends) ++sends;
  if (added.registered && added.sends) ++registered_sends;
  group_of_thread().operations.push_back(added);
  return comm.blocks ? kSuccess : kInProgress;
}

}  // namespace

extern "C" {

int ncclGetVersion(int* version) {
  *version = number_in("FAKE_NCCL_VERSION", 22809);
  return kSuccess;
}

int ncclGetUniqueId(UniqueId* id) {
  std::memset(id->bytes, 0, sizeof id->bytes);
  const std::string text = std::to_string(next_id++);
  std::memcpy(id->bytes, text.data(), text.size());
  return kSuccess;
}

// A blocking communicator is made when all ranks have come. FAKE_NCCL_ABSENT: the rank that never comes.
int ncclCommInitRankConfig(void** comm, int ranks, UniqueId id, int rank, const Config* config) {
  Comm* made = nullptr;
  {
    const std::lock_guard lock(shared().mutex);
    std::shared_ptr<Meeting>& meeting = shared().meetings[id.bytes];
    if (!meeting) {
      meeting = std::make_shared<Meeting>();
      meeting->ranks = ranks;  // once: another rank may already poll, without this lock
    }
    made = shared().comms.emplace_back(std::make_unique<Comm>(meeting, rank)).get();
  }
  *comm = made;
  made->blocks = config != nullptr && config->blocking == 1;
  std::unique_lock lock(made->meeting->mutex);
  if (number_in("FAKE_NCCL_ABSENT", -1) != rank) ++made->meeting->arrived;
  made->meeting->changed.notify_all();
  if (made->blocks) {
    ++blocking;
    made->meeting->changed.wait(lock, [&] { return made->meeting->arrived == ranks; });
    return kSuccess;
  }
  made->polls_in_progress = number_in("FAKE_NCCL_POLLS", 3);
  return kInProgress;
}

int ncclCommInitRank(void** comm, int ranks, UniqueId id, int rank) {
  ncclCommInitRankConfig(comm, ranks, id, rank, nullptr);
  return kSuccess;
}

// FAKE_NCCL_FAILS: the rank whose transfers fail.
int ncclCommGetAsyncError(void* comm, int* status) {
  auto& mine = *static_cast<Comm*>(comm);
  const std::lock_guard lock(mine.meeting->mutex);
  const bool waits = mine.finalizing && mine.meeting->finalized < mine.meeting->ranks;
  *status = mine.polls_in_progress > 0 || waits ? kInProgress : mine.status.load();
  if (mine.polls_in_progress > 0) --mine.polls_in_progress;
  return kSuccess;
}

int ncclCommAbort(void* comm) {
  auto& mine = *static_cast<Comm*>(comm);
  const std::lock_guard lock(mine.meeting->mutex);
  if (mine.aborted.exchange(true)) misuse("a communicator is aborted that has ended");
  ++aborted;
  registered_now -= static_cast<int>(mine.registered.size());
  mine.meeting->changed.notify_all();
  return kSuccess;
}

// FAKE_NCCL_FINALIZE_FAILS: the rank for which it fails. As NCCL's, it ends when all ranks have called it.
int ncclCommFinalize(void* comm) {
  auto& mine = *static_cast<Comm*>(comm);
  std::unique_lock lock(mine.meeting->mutex);
  if (!mine.registered.empty()) misuse("memory is still registered at the end");
  mine.finalizing = true;
  if (number_in("FAKE_NCCL_FINALIZE_FAILS", -1) == mine.rank) mine.status = kSystemError;
  ++mine.meeting->finalized;
  ++finalized;
  mine.meeting->changed.notify_all();
  if (mine.blocks) {
    mine.meeting->changed.wait(
        lock, [&] { return mine.aborted || mine.meeting->finalized == mine.meeting->ranks; });
    return mine.status;
  }
  mine.polls_in_progress = number_in("FAKE_NCCL_POLLS", 3);
  return kInProgress;
}

int ncclCommDestroy(void* comm) {
  auto& mine = *static_cast<Comm*>(comm);
  const std::lock_guard lock(mine.meeting->mutex);
  if (!mine.finalizing || mine.meeting->finalized < mine.meeting->ranks)
    misuse("a communicator is destroyed before all ranks have finalized it");
  if (mine.aborted.exchange(true)) misuse("a communicator is destroyed that has ended");
  ++destroyed;
  return kSuccess;
}

#ifndef FAKE_NCCL_WITHOUT_REGISTRATION
// FAKE_NCCL_REGISTER_FAILS: the rank for which it fails.
int ncclCommRegister(void* comm, void* data, std::size_t bytes, void** handle) {
  auto& mine = *static_cast<Comm*>(comm);
  if (number_in("FAKE_NCCL_REGISTER_FAILS", -1) == mine.rank) return kSystemError;
  const std::lock_guard lock(mine.meeting->mutex);
  const auto* begin = static_cast<const char*>(data);
  mine.registered.insert({begin, begin + bytes});
  ++registered_ever;
  ++registered_now;
  *handle = data;
  return kSuccess;
}

int ncclCommDeregister(void* comm, void* handle) {
  auto& mine = *static_cast<Comm*>(comm);
  const std::lock_guard lock(mine.meeting->mutex);
  if (mine.aborted) misuse("memory of a communicator that has ended is deregistered");
  const auto known = mine.registered.lower_bound({static_cast<const char*>(handle), nullptr});
  if (known == mine.registered.end() || known->first != handle) misuse("unknown memory is deregistered");
  mine.registered.erase(known);
  --registered_now;
  return kSuccess;
}
#endif

// How often something has happened since the library was loaded.
int fake_nccl_calls(const char* what) {
  const std::map<std::string, int> counts = {{"finalize", finalized},
                                             {"destroy", destroyed},
                                             {"abort", aborted},
                                             {"register", registered_ever},
                                             {"registered", registered_now},
                                             {"registered sends", registered_sends},
                                             {"sends", sends},
                                             {"blocking", blocking}};
  return counts.at(what);
}

const char* ncclGetErrorString(int status) {
  return status == kSystemError ? "unhandled system error" : "another error";
}

int ncclGroupStart() {
  Group& group = group_of_thread();
  if (group.open++ == 0) group.operations.clear();
  return kSuccess;
}

int ncclGroupEnd() {
  Group& group = group_of_thread();
  if (--group.open > 0 || group.operations.empty()) return kSuccess;
  Comm& comm = *group.operations[0].comm;
  if (!comm.blocks) comm.polls_in_progress = number_in("FAKE_NCCL_POLLS", 3);
  if (number_in("FAKE_NCCL_FAILS", -1) == comm.rank) comm.status = kSystemError;
  std::atomic<int>* const stream = group.operations[0].stream;
  ++*stream;
  std::thread([operations = group.operations, stream] {
    carry_out(operations);
    --*stream;
  }).detach();
  return comm.blocks ? kSuccess : kInProgress;
}

int ncclSend(const void* data, std::size_t count, int, int peer, void* comm, void* stream) {
  return add({static_cast<Comm*>(comm), true, const_cast<void*>(data), count, peer,
              static_cast<std::atomic<int>*>(stream), false});
}

int ncclRecv(void* data, std::size_t count, int, int peer, void* comm, void* stream) {
  return add(
      {static_cast<Comm*>(comm), false, data, count, peer, static_cast<std::atomic<int>*>(stream), false});
}
}
