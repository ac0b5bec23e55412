// Low-latency mode of ferry.deep_ep: dispatch and combine, each one call from Python.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "arrays/framework.hpp"
#include "base/errors.hpp"
#include "base/text.hpp"
#include "deep_ep/arguments.hpp"
#include "deep_ep/streams.hpp"
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

// How rows of a dispatch are quantised, as given. use_nvfp4 goes before use_fp8; x_global_scale is 1 / g.
struct LowLatencyFormat {
  const nb::object &use_fp8, &round_scale, &use_ue8m0, &use_nvfp4, &x_global_scale, &use_ue8m0_for_sf;

  // Throws UsageError for options that exclude each other.
  Format format() const;
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
  std::vector<std::shared_ptr<LowLatencyPool>> all;

 private:
  // `refused`: the exchange whose call ended with a refusal, or null.
  void make_one(LowLatencyPool& pool, const PooledExchange* refused);
  void refuse_others(const PooledExchange* used);

  const LowLatencyPool* last_ = nullptr;  // of this rank's last call; null: the shapes of the ranks' differed
  static void settle(PooledExchange& exchange);
};

// The Python class of handles: (src_info, layout_range, M, H, E). Python computes the first two on first
// access.
struct LowLatencyHandle {
  std::shared_ptr<LowLatencyPool> pool;
  nb::object exchange;  // the one that the dispatch used
  PyPlan plan;
  bool received = false;  // false: the dispatch's hook has not been called
  Array ids;              // topk_idx as passed to dispatch
  nb::object combine_buffer = nb::none();
  nb::object elements[2]{};  // src_info and layout_range, once computed

  // Throws UsageError if not received.
  void require_received() const;
};

// The Python class of hooks: runs a call's receive phase, once, on the stream of its send phase.
class ReceiveHook {
 public:
  // `handle`: a dispatch's; None for a combine.
  ReceiveHook(nb::object streams, std::shared_ptr<LowLatencyPools> pools,
              std::shared_ptr<LowLatencyPool> pool, PooledExchange& used, Stream stream, nb::object handle);

  void call();

 private:
  void receive();

  nb::object streams_;
  std::shared_ptr<LowLatencyPools> pools_;
  std::shared_ptr<LowLatencyPool> pool_;  // owns the exchange
  PooledExchange* used_;
  Stream stream_;
  nb::object handle_;
  bool pending_ = true;
};

// Runs a dispatch, or a phase of it. Its findings that name settings of Ferry are told in the words of the
// interface.
template <class Dispatch>
void dispatch_in_own_words(Dispatch dispatch) {
  static constexpr Phrase kWords[] = {
      {": format is ", ": the format that use_fp8, round_scale, use_ue8m0 and use_nvfp4 choose is "}};
  try {
    in_words(kWords, dispatch);
  } catch (const OverflowError& error) {
    const Overflow& found = error.overflow;
    throw OverflowError(
        str("topk_idx: some token lists an expert more than once: an expert of rank ", found.rank, " needs ",
            counted(found.needed, "row"), " and has R*M = ", found.capacity,
            "; routes dropped on all ranks: ", found.dropped, ": list an expert at most once for a token"),
        found);
  } catch (const UsageError& error) {
    if (std::string_view(error.what()).rfind("dispatch: global_scale", 0) != 0) throw;
    throw UsageError(
        "x_global_scale: so small that the scale of a block overflows: pass 2688 / largest |x|; the blocks "
        "concerned have scale 7F and values 0");
  }
}

// Runs a combine, or its receive phase, likewise. With a hook the reduction is exact, else partial.
template <class Combine>
void combine_in_own_words(Combine combine) {
  static constexpr Phrase kWords[] = {{"result (", "out ("},
                                      {"outputs (", "x ("},
                                      {"reduction is partial on rank ", "return_recv_hook is False on rank "},
                                      {"reduction is exact on rank ", "return_recv_hook is True on rank "},
                                      {" and partial on rank ", " and False on rank "},
                                      {" and exact on rank ", " and True on rank "}};
  in_words(kWords, combine);
}

// The low-latency calls of one Buffer.
class LowLatencyCalls {
 public:
  // `python`: the ferry.deep_ep._exchanges.Exchanges of the Buffer.
  LowLatencyCalls(nb::object streams, nb::object python)
      : streams_(std::move(streams)),
        python_(std::move(python)),
        pools_(std::make_shared<LowLatencyPools>(python_.attr("first_low_latency"))) {}

  nb::tuple dispatch(const nb::object& x, const nb::object& topk_idx, const nb::object& max_tokens,
                     const nb::object& experts, const nb::object& stats, const LowLatencyFormat& format,
                     const nb::object& async_finish, const nb::object& hooked);
  nb::tuple combine(const nb::object& x, const nb::object& topk_idx, const nb::object& topk_weights,
                    const nb::object& handle, const nb::object& use_logfmt, const nb::object& zero_copy,
                    const nb::object& async_finish, const nb::object& hooked, const nb::object& out);
  nb::object next_combine_buffer(const nb::object& handle);
  void close() { closed_ = true; }

 private:
  void require_open() const;
  std::shared_ptr<LowLatencyPool> pool_of(const LowLatencyShape& shape);
  // Runs `read`, which finds out what exchange a call uses. If it throws, the peers' calls end with the same
  // error, if they are of the shape of the last call, or also the first.
  template <class Read>
  auto read_or_refuse(Operation operation, Read read) {
    try {
      return read();
    } catch (const std::exception&) {
      refuse(operation, exception_object(std::current_exception()));
    }
  }
  [[noreturn]] void refuse(Operation operation, const nb::object& error);
  CallStreams& streams() const { return nb::cast<CallStreams&>(streams_); }
  // The EventOverlap that a call returns. `used`: tensors that the call reads and writes, of memory of stream
  // `current`.
  nb::object finish(Device device, Stream stream, Stream current, bool async_finish,
                    std::vector<nb::object> used);

  nb::object streams_, python_;
  std::shared_ptr<LowLatencyPools> pools_;
  std::shared_ptr<LowLatencyPool> last_;  // of the last call
  bool closed_ = false;
};

}  // namespace ferry::python
