#include "engine/engine.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <utility>

#include "base/callback_thread.hpp"
#include "base/environment.hpp"
#include "base/errors.hpp"
#include "base/text.hpp"
#include "engine/nccl_library.hpp"
#include "ferry/error.hpp"
#include "group/rank_state.hpp"

namespace ferry {
namespace {

// The name that nvidia-smi -L prints: GPU-01234567-89ab-cdef-0123-456789abcdef.
std::string name_of(const DeviceId& device) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string name = "GPU-";
  for (std::size_t i = 0; i < device.size(); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) name += '-';
    const auto byte = std::to_integer<unsigned>(device[i]);
    name += kDigits[byte >> 4];
    name += kDigits[byte & 15];
  }
  return name;
}

// What a connection asks of its rank when it ends.
struct Ending {
  std::function<bool()> group_has_failed;
  double seconds;  // how long it waits for the peers to end theirs
};

// What a connection is made of. `serial`, `registers` and `blocks`: the same on every rank.
struct NcclParts {
  Nccl::Comm comm;
  std::shared_ptr<DeviceStream> stream;
  std::function<void()> select;             // as DeviceAccess::select
  std::unique_ptr<Communicator> host_link;  // null: host memory goes through the device
  DeviceId device;
  std::int64_t serial;
  bool registers, blocks;
  Ending ending;
};

// A communicator of NCCL, with the stream of its transfers. Transfers run in one thread at a time, and other
// threads may register memory meanwhile.
class NcclConnection : public std::enable_shared_from_this<NcclConnection> {
 public:
  NcclConnection(const Nccl& nccl, NcclParts parts) : nccl_(nccl), parts_(std::move(parts)) {}
  NcclConnection(const NcclConnection&) = delete;
  NcclConnection& operator=(const NcclConnection&) = delete;
  ~NcclConnection() {
    if (failure_) return;
    // A rank that ends by an exception does not wait for its peers.
    const bool finalized = std::uncaught_exceptions() == 0 && finalize();
    finalized ? nccl_.destroy(parts_.comm) : nccl_.abort(parts_.comm);
  }

  const DeviceId& device() const { return parts_.device; }
  std::int64_t serial() const { return parts_.serial; }

  // As Communicator::all_to_all_v.
  void all_to_all_v(const AllToAllV& transfer, const std::shared_ptr<void>& keep, const NcclCheck& check) {
    if (failure_) std::rethrow_exception(failure_);
    try {
      if (transfer.device) {
        exchange(transfer, check);
      } else if (parts_.host_link) {
        parts_.host_link->all_to_all_v(transfer, keep, check);
      } else {
        exchange_host_memory(transfer, check);
      }
    } catch (...) {
      const std::lock_guard lock(mutex_);
      failure_ = std::current_exception();
      nccl_.abort(parts_.comm);
      keep_forever(keep);
      throw;
    }
  }

  // As Communicator::register_memory.
  std::shared_ptr<void> register_memory(std::byte* data, std::int64_t bytes) {
    if (!parts_.registers) return nullptr;
    void* handle = nullptr;
    {
      const std::lock_guard lock(mutex_);
      if (failure_) std::rethrow_exception(failure_);
      nccl_.require(nccl_.register_memory(parts_.comm, data, static_cast<std::size_t>(bytes), &handle),
                    "ncclCommRegister");
    }
    return {handle, [connection = shared_from_this()](void* given) { connection->deregister(given); }};
  }

 private:
  // NCCL has ended the registrations of a communicator that it has aborted.
  void deregister(void* handle) {
    const std::lock_guard lock(mutex_);
    if (!failure_) nccl_.deregister_memory(parts_.comm, handle);
  }

  // Waits until all ranks have ended their communicators, which they do at about the same time. Returns
  // whether this one is ready to be destroyed. Otherwise it must be aborted: the group has failed, or a peer
  // takes too long.
  bool finalize() {
    const WaitLimit limit{.seconds = parts_.ending.seconds};
    const NcclCheck check = [&] {
      if (parts_.ending.group_has_failed()) throw SystemError("the group has failed", EIO);
      if (limit.seconds_left() <= 0) throw SystemError("a peer has not ended its communicator", ETIME);
    };
    try {
      if (parts_.blocks) {
        run_blocking_nccl(
            [&nccl = nccl_, comm = parts_.comm, select = parts_.select] {
              if (select) select();
              nccl.require(nccl.finalize(comm), "ncclCommFinalize");
            },
            check);
      } else {
        settle_nccl(nccl_, parts_.comm, nccl_.finalize(parts_.comm), "ncclCommFinalize", check);
      }
    } catch (const Error&) {
      return false;
    }
    return true;
  }

  void exchange(const AllToAllV& transfer, const NcclCheck& check) {
    NcclGroup group(nccl_);
    for (std::size_t peer = 0; peer < transfer.send_bytes.size(); ++peer) {
      const int rank = static_cast<int>(peer);
      if (const std::int64_t bytes = transfer.send_bytes[peer]; bytes > 0) {
        settle(nccl_.send(transfer.send + transfer.send_offsets[peer], static_cast<std::size_t>(bytes),
                          Nccl::kBytes, rank, parts_.comm, parts_.stream->handle()),
               "ncclSend");
      }
      if (const std::int64_t bytes = transfer.receive_bytes[peer]; bytes > 0) {
        settle(
            nccl_.receive(transfer.receive + transfer.receive_offsets[peer], static_cast<std::size_t>(bytes),
                          Nccl::kBytes, rank, parts_.comm, parts_.stream->handle()),
            "ncclRecv");
      }
    }
    settle_nccl(nccl_, parts_.comm, group.end(), "ncclGroupEnd", check);
    parts_.stream->wait([&] {
      check();
      int status = Nccl::kSuccess;
      nccl_.require(nccl_.async_error(parts_.comm, &status), "ncclCommGetAsyncError");
      if (status != Nccl::kInProgress) nccl_.require(status, "a transfer of NCCL");
    });
  }

  // Within a group a call only records its work.
  void settle(int status, const char* function) const {
    if (status != Nccl::kInProgress) nccl_.require(status, function);
  }

  // Exchanges the blocks of a call: a few kilobytes for each rank.
  void exchange_host_memory(const AllToAllV& transfer, const NcclCheck& check) {
    const std::int64_t sent = extent(transfer.send_bytes, transfer.send_offsets),
                       received = extent(transfer.receive_bytes, transfer.receive_offsets);
    std::byte* const memory = parts_.stream->memory(sent + received);
    AllToAllV on_device = transfer;
    on_device.send = memory;
    on_device.receive = memory + sent;
    on_device.device = true;
    parts_.stream->copy(memory, transfer.send, sent);
    exchange(on_device, check);
    for (std::size_t peer = 0; peer < transfer.receive_bytes.size(); ++peer) {
      const std::int64_t at = transfer.receive_offsets[peer];
      parts_.stream->copy(transfer.receive + at, on_device.receive + at, transfer.receive_bytes[peer]);
    }
    parts_.stream->wait(check);
  }

  // Where the last of the pieces ends.
  static std::int64_t extent(std::span<const std::int64_t> bytes, std::span<const std::int64_t> offsets) {
    std::int64_t end = 0;
    for (std::size_t peer = 0; peer < bytes.size(); ++peer) {
      if (bytes[peer] > 0) end = std::max(end, offsets[peer] + bytes[peer]);
    }
    return end;
  }

  const Nccl& nccl_;
  const NcclParts parts_;
  std::mutex mutex_;            // guards failure_ and the registrations
  std::exception_ptr failure_;  // NCCL has aborted the communicator, and freed it
};

// A lane. All lanes share the connection, because transfers run one at a time in any case. Ranks that call
// their lanes in different order then meet in one communicator and find out, instead of waiting in different
// ones.
class NcclCommunicator final : public Communicator {
 public:
  explicit NcclCommunicator(std::shared_ptr<NcclConnection> connection)
      : connection_(std::move(connection)) {}

  void all_to_all_v(const AllToAllV& transfer, const std::shared_ptr<void>& keep,
                    const NcclCheck& check) override {
    connection_->all_to_all_v(transfer, keep, check);
  }
  bool gives_up_at_once() const override { return true; }
  // A second transfer costs more than these bytes, enough for the counts of 500 experts on devices.
  std::int64_t first_bytes() const override { return 6144; }
  std::shared_ptr<void> register_memory(std::byte* data, std::int64_t bytes) override {
    return connection_->register_memory(data, bytes);
  }

 private:
  const std::shared_ptr<NcclConnection> connection_;
};

class NcclEngine final : public Engine {
 public:
  NcclEngine(RankState& rank, double deadline, DeviceAccess device)
      : rank_(rank), deadline_(deadline), device_(std::move(device)) {}

  EngineKind kind() const override { return EngineKind::nccl; }
  bool ordered_lanes() const override { return true; }
  bool takes_device_memory() const override { return true; }

  // For communicators made from now on.
  void use(double deadline, DeviceAccess device) {
    deadline_ = deadline;
    device_ = std::move(device);
  }

  std::vector<std::unique_ptr<Communicator>> communicators(int lanes) override {
    // Dropped here: it may hold the rank, which holds this engine.
    const auto make_host_link = std::exchange(device_.make_host_link, nullptr);
    const std::shared_ptr<NcclConnection> connection = connection_of_all_ranks(make_host_link);
    std::vector<std::unique_ptr<Communicator>> made;
    for (int lane = 0; lane < lanes; ++lane) made.push_back(std::make_unique<NcclCommunicator>(connection));
    return made;
  }

 private:
  // The message of a rank to the others before they connect.
  struct Introduction {
    DeviceId device;
    std::int64_t connection;  // that it still has to this device; kNone: none
    int version;              // of NCCL; 0: it has none, and says why
    int registers;            // 1: it can register memory, and has been asked to
    int blocks;               // 1: it has been asked for a blocking communicator
    char problem[480];        // ends with a zero
  };
  static constexpr std::int64_t kNone = -1;

  int ranks() const { return rank_.topology().ranks(); }

  // Collective. The connection that all ranks have, or a new one.
  std::shared_ptr<NcclConnection> connection_of_all_ranks(
      const std::function<std::unique_ptr<Communicator>()>& make_host_link) {
    std::shared_ptr<NcclConnection> connection = connection_.lock();
    Introduction mine{
        .device = device_.id, .connection = kNone, .version = 0, .registers = 0, .blocks = 0, .problem = {}};
    if (connection && connection->device() == device_.id) mine.connection = connection->serial();
    const Nccl* nccl = nullptr;
    try {
      nccl = &load_nccl();
      mine.version = nccl->version_number();
      if (nccl->register_memory != nullptr && nccl->deregister_memory != nullptr)
        mine.registers = Environment::says_yes(&Environment::nccl_register) ? 1 : 0;
      mine.blocks = Environment::says_yes(&Environment::nccl_blocking) ? 1 : 0;
    } catch (const Error& error) {
      std::strncpy(mine.problem, error.what(), sizeof mine.problem - 1);
    }
    std::vector<Introduction> all(static_cast<std::size_t>(ranks()));
    rank_.all_gather(&mine, all.data(), sizeof mine);
    require_connectable(all);
    const bool all_have_it = std::all_of(all.begin(), all.end(), [&](const Introduction& each) {
      return each.connection != kNone && each.connection == all[0].connection;
    });
    if (all_have_it) return connection;
    const auto all_ask = [&](int Introduction::* what) {
      return std::all_of(all.begin(), all.end(), [&](const Introduction& each) { return each.*what != 0; });
    };
    std::unique_ptr<Communicator> host_link;
    if (make_host_link && rank_.one_host()) host_link = make_host_link();
    const bool blocks = all_ask(&Introduction::blocks);
    const std::shared_ptr<DeviceStream> stream = device_.make_stream();
    connection =
        std::make_shared<NcclConnection>(*nccl, NcclParts{.comm = connect(*nccl, blocks, stream),
                                                          .stream = stream,
                                                          .select = device_.select,
                                                          .host_link = std::move(host_link),
                                                          .device = device_.id,
                                                          .serial = connections_made_++,
                                                          .registers = all_ask(&Introduction::registers),
                                                          .blocks = blocks,
                                                          .ending = ending()});
    connection_ = connection;
    return connection;
  }

  // Throws on all ranks if one of them cannot connect, with its reason.
  static void require_connectable(const std::vector<Introduction>& all) {
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      if (all[rank].version == 0)
        throw UnsupportedError(str("the engine nccl cannot be used on rank ", rank, ": ", all[rank].problem));
      if (all[rank].version != all[0].version) {
        throw UnsupportedError(str("the engine nccl: rank 0 has version ", all[0].version,
                                   " of NCCL and rank ", rank, " has ", all[rank].version,
                                   ": use the same on all ranks"));
      }
    }
    require_own_devices(all);
  }

  static void require_own_devices(const std::vector<Introduction>& all) {
    std::map<DeviceId, std::vector<int>> ranks_of;
    for (std::size_t rank = 0; rank < all.size(); ++rank)
      ranks_of[all[rank].device].push_back(static_cast<int>(rank));
    std::string shared;
    for (const auto& [device, ranks] : ranks_of) {
      if (ranks.size() < 2) continue;
      shared += shared.empty() ? "" : "; ";
      for (std::size_t i = 0; i < ranks.size(); ++i)
        shared += str(i == 0 ? "ranks " : i + 1 < ranks.size() ? ", " : " and ", ranks[i]);
      shared += str(" share ", name_of(device));
    }
    if (shared.empty()) return;
    throw UnsupportedError(str("the engine nccl needs a GPU for each rank: ", shared,
                               ". Give each rank a GPU of its own, by cudaSetDevice() or "
                               "CUDA_VISIBLE_DEVICES and its local rank, or use the backend cuda"));
  }

  Ending ending() const {
    const WaitRecord none{Operation::none, 0, rank_.index(), -1, 0, 0};
    // Half the deadline: peers that wait for this rank meanwhile wait longer.
    return {.group_has_failed = [rank = &rank_, none] { return rank->check_peers(none); },
            .seconds = deadline_ / 2};
  }

  Nccl::UniqueId id_of_rank_0(const Nccl& nccl) const {
    Nccl::UniqueId mine{};
    if (rank_.index() == 0) nccl.require(nccl.unique_id(&mine), "ncclGetUniqueId");
    std::vector<Nccl::UniqueId> all(static_cast<std::size_t>(ranks()));
    rank_.all_gather(&mine, all.data(), sizeof mine);
    return all[0];
  }

  Nccl::Comm connect(const Nccl& nccl, bool blocks, const std::shared_ptr<DeviceStream>& stream) const {
    const NcclMembers members{
        .id = id_of_rank_0(nccl), .rank = rank_.index(), .ranks = ranks(), .blocks = blocks};
    const WaitLimit limit{.seconds = deadline_};
    const WaitRecord record{Operation::none, 0, rank_.index(), -1, 0, 0};
    return connect_nccl(nccl, members, device_, stream, [&] {
      if (limit.seconds_left() <= 0) rank_.time_out(record, deadline_);
      if (rank_.check_peers(record)) rank_.control().throw_failure(record);
    });
  }

  RankState& rank_;
  double deadline_;
  DeviceAccess device_;
  // Owned by the lanes, so that it ends with the last exchange that uses it.
  std::weak_ptr<NcclConnection> connection_;
  std::int64_t connections_made_ = 0;
};

}  // namespace

std::shared_ptr<Engine> make_nccl_engine(RankState& rank, double deadline, DeviceAccess device) {
  return std::make_shared<NcclEngine>(rank, deadline, std::move(device));
}

Engine& nccl_engine_of(RankState& rank, double deadline, DeviceAccess device) {
  const std::shared_ptr<Engine>& known = rank.nccl_engine();
  if (known) {
    static_cast<NcclEngine&>(*known).use(deadline, std::move(device));
  } else {
    rank.set_nccl_engine(make_nccl_engine(rank, deadline, std::move(device)));
  }
  return *known;
}

}  // namespace ferry
