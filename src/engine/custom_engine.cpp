#include "engine/custom_engine.hpp"

#include <atomic>
#include <utility>

#include "engine/engine_thread.hpp"
#include "ferry/error.hpp"

namespace ferry {

namespace {

class CustomCommunicator : public Communicator {
 public:
  CustomCommunicator(std::shared_ptr<EngineThread> thread, int lane)
      : thread_(std::move(thread)), lane_(lane) {}

  void all_to_all_v(const AllToAllV& transfer, const std::shared_ptr<void>& keep,
                    const std::function<void()>& check) override {
    thread_->run(lane_, transfer, keep, check);
  }

 private:
  std::shared_ptr<EngineThread> thread_;
  int lane_;
};

class CustomEngine : public Engine {
 public:
  explicit CustomEngine(EngineFunctions functions) : functions_(std::move(functions)) {}

  EngineKind kind() const override { return EngineKind::custom; }
  bool ordered_lanes() const override { return functions_.ordered_lanes; }

  // Threads start here and not with the engine: a program may fork its ranks after it has made the group.
  std::vector<std::unique_ptr<Communicator>> communicators(int lanes) override {
    std::vector<std::unique_ptr<Communicator>> made;
    for (int i = 0; i < lanes; ++i) {
      if (!functions_.ordered_lanes || !thread_) thread_ = std::make_shared<EngineThread>(functions_);
      made.push_back(std::make_unique<CustomCommunicator>(thread_, next_lane_++));
    }
    return made;
  }

 private:
  EngineFunctions functions_;
  std::shared_ptr<EngineThread> thread_;  // ordered lanes: of all lanes; else of the last one
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
