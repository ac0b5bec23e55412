// The exchanges of low-latency calls: which one a call uses, and how the ranks agree to make one.
#pragma once

#include <memory>
#include <vector>

#include "arrays/framework.hpp"
#include "deep_ep/arguments.hpp"
#include "errors.hpp"
#include "lane_call.hpp"

namespace ferry::python {

// The numbers that calls of one exchange have in common.
struct LowLatencyShape {
  int max_tokens = 0, hidden = 0, experts = 0, top_k = 0;
  bool on_device = false;

  bool operator==(const LowLatencyShape&) const = default;
};

struct PooledExchange {
  nb::object owner;
  PyExchange* exchange;
  bool busy = false;            // between the phases of a call
  int owed = 0;                 // refusals for when it is no longer busy
  bool others_refused = false;  // when its call began
};

// Equal exchanges, one for each call between its two phases. All ranks make the same number of them.
struct LowLatencyPool {
  static constexpr std::size_t kMost = 4;

  explicit LowLatencyPool(const LowLatencyShape& of) : shape(of) {}

  bool may_acquire() const;
  void add(nb::object exchange);

  LowLatencyShape shape;
  std::vector<std::unique_ptr<PooledExchange>> exchanges;

  // Facts about each exchange, known once there is one:
  PlanShape plan_shape;
  std::int64_t local_experts = 0, capacity = 0;  // L, R*M
  TensorShape values, fp8_values, scales, packed_scales, nvfp4_values, nvfp4_scales, counts, plan;

 private:
  void learn(const PyExchange& exchange);
};

// The pools of a Buffer. The peers of a rank whose call is of another shape than its last one may be in a
// call of another exchange. So the rank refuses a call of each other exchange with kMustAgree. All ranks that
// change their shape do, and so does a rank whose call ends with this refusal; then the ranks' hosts gather
// the shapes. On devices, where a refusal is a kernel, only a rank that makes an exchange refuses.
struct LowLatencyPools {
  explicit LowLatencyPools(nb::object first_low_latency) : make(std::move(first_low_latency)) {}

  std::shared_ptr<LowLatencyPool> of(const LowLatencyShape& shape);

  // Returns an exchange of the pool that is not busy. If there is none, makes one, a collective operation.
  // Throws UsageError if kMost are busy.
  PooledExchange& acquire(LowLatencyPool& pool);

  // Runs a call of `used`, of `pool`, that waits for the peers.
  template <class Call>
  void run(LowLatencyPool& pool, PooledExchange& used, Call call) {
    try {
      call();
    } catch (const Error& error) {
      if (!must_agree(error)) {
        settle(used);
      } else if (used.owed > 0) {  // the ranks have gathered since the send phase
        --used.owed;
        settle(used);
      } else {
        make_one(pool, &used);  // raises, because the shapes differ
      }
      throw;
    }
    settle(used);
  }

  nb::object make;  // first_low_latency of the Exchanges
 private:
  // `refused`: the exchange whose call ended with a refusal, or null.
  void make_one(LowLatencyPool& pool, const PooledExchange* refused);
  void refuse_others(const PooledExchange* used);

  std::vector<std::shared_ptr<LowLatencyPool>> all_;
  // Of this rank's last call. Null: there was none, or its ranks gave different shapes.
  const LowLatencyPool* last_ = nullptr;
  static void settle(PooledExchange& exchange);
};

}  // namespace ferry::python
