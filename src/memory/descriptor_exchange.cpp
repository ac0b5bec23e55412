#include "memory/descriptor_exchange.hpp"

#include <fcntl.h>

#include <cerrno>
#include <chrono>
#include <optional>
#include <utility>

#include "base/descriptors.hpp"
#include "base/errors.hpp"
#include "base/text.hpp"
#include "group/agreement.hpp"
#include "group/rank_state.hpp"

namespace ferry {

namespace {

using Clock = std::chrono::steady_clock;

// Between two checks of the peers; also how soon a send to a full queue is tried again.
constexpr int kCheckIntervalMs = 10;

class DescriptorExchange {
 public:
  DescriptorExchange(const Rank& rank, const FileDescriptor& mine)
      : rank_(rank),
        mine_(mine),
        addresses_(rank.size()),
        sent_(rank.size()),
        received_(rank.size()),
        files_(rank.size()) {}

  std::vector<FileDescriptor> run() {
    SocketAddress address{};
    run_on_all_ranks(rank_, [&] { address = open_socket(); });
    rank_.all_gather(&address, addresses_.data(), sizeof address);
    // The agreement at the end also keeps every socket open until all ranks have received.
    run_on_all_ranks(rank_, [&] { transfer(); });
    return std::move(files_);
  }

 private:
  SocketAddress open_socket();
  void transfer();
  void receive_all();
  void check_peers(Clock::time_point start);
  int unfinished_peer() const;

  const Rank& rank_;
  const FileDescriptor& mine_;
  std::optional<DescriptorSocket> socket_;
  std::vector<SocketAddress> addresses_;  // [ranks]
  std::vector<char> sent_, received_;     // [ranks]
  std::vector<FileDescriptor> files_;     // [ranks]
};

SocketAddress DescriptorExchange::open_socket() {
  files_[rank_.index()] = FileDescriptor(fcntl(mine_.number(), F_DUPFD_CLOEXEC, 0));
  if (!files_[rank_.index()].valid()) throw system_error("cannot duplicate a file", errno);
  sent_[rank_.index()] = received_[rank_.index()] = 1;
  return socket_.emplace().address();
}

void DescriptorExchange::transfer() {
  for (const Clock::time_point start = Clock::now();; check_peers(start)) {
    // A send that fails is repeated: the queue is full, or the peer is dying, which check_peers() finds.
    for (int peer = 0; peer < rank_.size(); ++peer) {
      if (!sent_[peer]) sent_[peer] = socket_->send(addresses_[peer], rank_.index(), mine_) == 0;
    }
    receive_all();
    if (unfinished_peer() < 0) break;
    socket_->wait(kCheckIntervalMs);
  }
  for (int peer = 0; peer < rank_.size(); ++peer) {
    // A process at its limit of open files gets the message without the file.
    if (!files_[peer].valid()) throw system_error(str("cannot receive the file of rank ", peer), EMFILE);
  }
}

void DescriptorExchange::receive_all() {
  while (std::optional<DescriptorSocket::Message> message = socket_->receive()) {
    if (message->from < 0 || message->from >= rank_.size()) continue;
    received_[message->from] = 1;
    files_[message->from] = std::move(message->file);
  }
}

// A rank that has not sent its file or not taken this rank's yet, or -1.
int DescriptorExchange::unfinished_peer() const {
  for (int peer = 0; peer < rank_.size(); ++peer) {
    if (!sent_[peer] || !received_[peer]) return peer;
  }
  return -1;
}

// Throws if the group has failed or the deadline has expired.
void DescriptorExchange::check_peers(Clock::time_point start) {
  RankState& state = rank_.state();
  const WaitRecord record{Operation::construct, 0, rank_.index(), unfinished_peer(), 1, 0};
  if (state.check_peers(record)) state.control().throw_failure(record);
  if (Clock::now() - start < std::chrono::duration<double>(state.deadline())) return;
  state.time_out(record, state.deadline());
  state.control().throw_failure(record);
}

}  // namespace

std::vector<FileDescriptor> exchange_descriptors(const Rank& rank, const FileDescriptor& mine) {
  return DescriptorExchange(rank, mine).run();
}

}  // namespace ferry
