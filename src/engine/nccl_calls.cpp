#include "engine/nccl_calls.hpp"

#include <atomic>
#include <chrono>
#include <exception>
#include <future>
#include <limits>
#include <thread>
#include <utility>

#include "base/callback_thread.hpp"
#include "base/process.hpp"
#include "engine/transfer_thread.hpp"

namespace ferry {

void settle_nccl(const Nccl& nccl, Nccl::Comm comm, int status, const char* function,
                 const NcclCheck& check) {
  // The start of a transfer takes NCCL's thread some microseconds, and a sleep at least 50.
  constexpr int kPolls = 2000, kPollsBetweenChecks = 100;
  constexpr auto kPause = std::chrono::microseconds(20);
  for (int polls = 1; status == Nccl::kInProgress; ++polls) {
    if (polls > kPolls) std::this_thread::sleep_for(kPause);
    if (polls > kPolls || polls % kPollsBetweenChecks == 0) check();
    pause_processor();
    nccl.require(nccl.async_error(comm, &status), "ncclCommGetAsyncError");
  }
  nccl.require(status, function);
}

void run_blocking_nccl(const std::function<void()>& calls, const NcclCheck& check) {
  constexpr auto kCheckPeriod = std::chrono::milliseconds(10);
  auto thread = std::make_shared<TransferThread>();
  std::future<std::exception_ptr> done = thread->submit(calls);
  try {
    while (done.wait_for(kCheckPeriod) != std::future_status::ready) check();
  } catch (...) {
    keep_forever(std::move(thread));
    throw;
  }
  if (const std::exception_ptr error = done.get()) std::rethrow_exception(error);
}

namespace {

Nccl::Config config_of(bool blocks) {
  constexpr int kUndefined = std::numeric_limits<int>::min();
  return {.blocking = blocks ? 1 : 0,
          .cga_cluster_size = kUndefined,
          .min_ctas = kUndefined,
          .max_ctas = kUndefined,
          .net_name = nullptr,
          .split_share = kUndefined,
          .traffic_class = kUndefined};
}

// A byte from every rank to every other one: NCCL connects a pair at its first transfer, and then for good.
void connect_every_pair(const Nccl& nccl, Nccl::Comm comm, const NcclMembers& members, DeviceStream& stream) {
  std::byte* const memory = stream.memory(2 * std::int64_t{members.ranks});
  NcclGroup group(nccl);
  for (int peer = 0; peer < members.ranks; ++peer) {
    if (peer == members.rank) continue;
    nccl.require(nccl.send(memory + peer, 1, Nccl::kBytes, peer, comm, stream.handle()), "ncclSend");
    nccl.require(nccl.receive(memory + members.ranks + peer, 1, Nccl::kBytes, peer, comm, stream.handle()),
                 "ncclRecv");
  }
  nccl.require(group.end(), "ncclGroupEnd");
}

Nccl::Comm connect_blocking(const Nccl& nccl, const NcclMembers& members, const DeviceAccess& device,
                            const std::shared_ptr<DeviceStream>& stream, const NcclCheck& check) {
  const auto made = std::make_shared<std::atomic<Nccl::Comm>>(nullptr);
  const auto calls = [&nccl, members, select = device.select, stream, made] {
    if (select) select();
    Nccl::Config config = config_of(true);
    Nccl::Comm comm = nullptr;
    nccl.require(nccl.init_rank_config(&comm, members.ranks, members.id, members.rank, &config),
                 "ncclCommInitRankConfig");
    *made = comm;
    connect_every_pair(nccl, comm, members, *stream);
  };
  try {
    run_blocking_nccl(calls, check);
    stream->wait(check);
  } catch (...) {
    if (*made != nullptr) nccl.abort(*made);
    throw;
  }
  return *made;
}

}  // namespace

Nccl::Comm connect_nccl(const Nccl& nccl, const NcclMembers& members, const DeviceAccess& device,
                        const std::shared_ptr<DeviceStream>& stream, const NcclCheck& check) {
  if (members.blocks) return connect_blocking(nccl, members, device, stream, check);
  Nccl::Config config = config_of(false);
  Nccl::Comm comm = nullptr;
  const int status = nccl.init_rank_config(&comm, members.ranks, members.id, members.rank, &config);
  try {
    settle_nccl(nccl, comm, status, "ncclCommInitRankConfig", check);
  } catch (...) {
    if (comm != nullptr) nccl.abort(comm);
    throw;
  }
  return comm;
}

}  // namespace ferry
