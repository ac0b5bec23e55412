// The relay's part of a dispatch in two hops: a token that has come to this node once goes on to every rank
// here that holds one of its experts.
#pragma once

#include <vector>

#include "backends/cpu/lane.hpp"
#include "layout/message.hpp"

namespace ferry::cpu {

class DispatchRelay final : public Forwarder {
 public:
  explicit DispatchRelay(const CpuContext& context);

  // Starts a call.
  void start(const MessageLayout& layout);

  std::vector<ForwardedMessages> plan(std::span<const HeldMessages> held) override;
  void write(std::span<ForwardedMessages> forwards) override;

  // Expert ids that do not exist in messages of this call: a source rank's plan is damaged. [message index]
  const std::vector<std::int64_t>& bad_messages() const { return bad_messages_; }

 private:
  const CpuContext& context_;
  const int node_;
  MessageLayout layout_{};
  std::vector<std::int64_t> bad_messages_;
  // [R origins, ranks of this node] the messages to forward, in the order of the origin's tokens.
  std::vector<std::vector<const std::byte*>> messages_;

  std::vector<const std::byte*>& messages_for(int origin, int final);
};

// Index of `rank` in the ascending list of the ranks that hold a token's experts. `ids`: [K].
int position_of_rank(const Config& config, const std::int32_t* ids, int rank);

}  // namespace ferry::cpu
