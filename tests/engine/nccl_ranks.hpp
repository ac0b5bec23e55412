// Ranks with the engine `nccl`, over a library that stands in for NCCL (fake_nccl.cpp).
#pragma once

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "backends/collective/window_communicator.hpp"
#include "engine/engine.hpp"
#include "ferry/group.hpp"

namespace ferry::test {

// Streams of host memory, as fake_nccl.cpp takes them. Never freed, because abandoned transfers use them.
inline std::atomic<int>* new_stream() {
  static auto* const mutex = new std::mutex;
  static auto* const streams = new std::deque<std::atomic<int>>;
  const std::lock_guard lock(*mutex);
  return &streams->emplace_back(0);
}

class HostStream final : public DeviceStream {
 public:
  void* handle() const override { return pending_; }
  std::byte* memory(std::int64_t bytes) override {
    if (memory_.size() < static_cast<std::size_t>(bytes)) memory_.resize(static_cast<std::size_t>(bytes));
    return memory_.data();
  }
  void copy(void* to, const void* from, std::int64_t bytes) override {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }
  void wait(const std::function<void()>& check) override {
    while (*pending_ > 0) {
      check();
      std::this_thread::yield();
    }
  }

 private:
  std::atomic<int>* const pending_ = new_stream();
  std::vector<std::byte> memory_;
};

inline DeviceAccess device_of(int number) {
  DeviceId id{};
  id[0] = static_cast<std::byte>(number);
  return {.id = id, .make_stream = [] { return std::make_unique<HostStream>(); }};
}

// The same for a rank on one host with its peers, where host memory may travel in shared memory.
inline DeviceAccess device_of(int number, const Rank& rank, bool shares_host_memory) {
  DeviceAccess device = device_of(number);
  if (shares_host_memory) device.make_host_link = [rank] { return collective::make_header_link(rank); };
  return device;
}

// Device memory, which here is host memory too.
class OnDevice final : public Communicator {
 public:
  explicit OnDevice(Communicator& communicator) : communicator_(communicator) {}

  void all_to_all_v(const AllToAllV& transfer, const std::shared_ptr<void>& keep,
                    const std::function<void()>& check) override {
    AllToAllV on_device = transfer;
    on_device.device = true;
    communicator_.all_to_all_v(on_device, keep, check);
  }

 private:
  Communicator& communicator_;
};

// Runs `body(rank, engine)` with an engine for each rank, on devices of their own.
inline void run_nccl(int ranks, const std::function<void(Rank rank, Engine& engine)>& body,
                     double deadline = 10, const char* library = FERRY_FAKE_NCCL) {
  setenv("FERRY_NCCL_LIBRARY", library, 1);
  Group::threads(ranks).run([&](Rank rank) {
    const std::shared_ptr<Engine> engine = make_nccl_engine(rank.state(), deadline, device_of(rank.index()));
    body(rank, *engine);
  });
}

// Calls of the stand-in: see fake_nccl_calls().
inline int nccl_calls(const char* what, const char* library = FERRY_FAKE_NCCL) {
  using Calls = int (*)(const char*);
  return reinterpret_cast<Calls>(dlsym(dlopen(library, RTLD_NOW | RTLD_LOCAL), "fake_nccl_calls"))(what);
}

// An environment variable while the object lives. No other thread may read the environment when it changes.
class Setting {
 public:
  Setting(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~Setting() { unsetenv(name_); }
  Setting(const Setting&) = delete;
  Setting& operator=(const Setting&) = delete;

 private:
  const char* const name_;
};

}  // namespace ferry::test
