// What Ferry uses of NCCL, between threads of one process and on host memory. A stream is a pointer to
// std::atomic<int>: transfers that it still waits for.
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int kSuccess = 0, kSystemError = 2, kInProgress = 7;

struct UniqueId {
  char bytes[128];
};

// A message that waits for its receiver.
struct Message {
  const void* data;
  std::size_t bytes;
  std::atomic<bool> taken = false;
};

// The ranks of one communicator.
struct Meeting {
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
};

struct Operation {
  Comm* comm;
  bool sends;
  void* data;
  std::size_t bytes;
  int peer;
  std::atomic<int>* stream;
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
    if (message->bytes != each.bytes) std::abort();
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
  group_of_thread().operations.push_back(operation);
  return kInProgress;
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

int ncclCommInitRankConfig(void** comm, int, UniqueId id, int rank, void*) {
  const std::lock_guard lock(shared().mutex);
  std::shared_ptr<Meeting>& meeting = shared().meetings[id.bytes];
  if (!meeting) meeting = std::make_shared<Meeting>();
  Comm* const made = shared().comms.emplace_back(std::make_unique<Comm>(meeting, rank)).get();
  made->polls_in_progress = number_in("FAKE_NCCL_POLLS", 3);
  *comm = made;
  return kInProgress;
}

int ncclCommInitRank(void** comm, int ranks, UniqueId id, int rank) {
  ncclCommInitRankConfig(comm, ranks, id, rank, nullptr);
  return kSuccess;
}

// FAKE_NCCL_FAILS: the rank whose transfers fail.
int ncclCommGetAsyncError(void* comm, int* status) {
  auto& mine = *static_cast<Comm*>(comm);
  *status = mine.polls_in_progress > 0 ? kInProgress : mine.status.load();
  if (mine.polls_in_progress > 0) --mine.polls_in_progress;
  return kSuccess;
}

int ncclCommAbort(void* comm) {
  auto& mine = *static_cast<Comm*>(comm);
  const std::lock_guard lock(mine.meeting->mutex);
  mine.aborted = true;
  mine.meeting->changed.notify_all();
  return kSuccess;
}

int ncclCommDestroy(void* comm) {
  return ncclCommAbort(comm);
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
  comm.polls_in_progress = number_in("FAKE_NCCL_POLLS", 3);
  if (number_in("FAKE_NCCL_FAILS", -1) == comm.rank) comm.status = kSystemError;
  std::atomic<int>* const stream = group.operations[0].stream;
  ++*stream;
  std::thread([operations = group.operations, stream] {
    carry_out(operations);
    --*stream;
  }).detach();
  return kInProgress;
}

int ncclSend(const void* data, std::size_t count, int, int peer, void* comm, void* stream) {
  return add({static_cast<Comm*>(comm), true, const_cast<void*>(data), count, peer,
              static_cast<std::atomic<int>*>(stream)});
}

int ncclRecv(void* data, std::size_t count, int, int peer, void* comm, void* stream) {
  return add({static_cast<Comm*>(comm), false, data, count, peer, static_cast<std::atomic<int>*>(stream)});
}
}
