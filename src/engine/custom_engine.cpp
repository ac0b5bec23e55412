#include "engine/custom_engine.hpp"

#include <atomic>
#include <utility>

#include "base/callback_thread.hpp"
#include "ferry/error.hpp"

namespace ferry {

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

}  // namespace ferry
