// A network for kernels on the host: what is put between nodes arrives late and in any order.
#pragma once

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "backends/cuda/transport/transport.cuh"
#include "kernels_on_host/grid.hpp"

namespace ferry::cuda {

class Network {
 public:
  explicit Network(std::uint64_t seed) : random_(seed) {}

  // Something on its way. The bytes are read when they arrive, as a network card does.
  struct Transfer {
    std::byte* to = nullptr;
    const std::byte* from = nullptr;
    int bytes = 0;
    Flag* flag = nullptr;
    std::uint64_t value = 0;
  };
  void send(const Transfer& transfer) { pending_.push_back(transfer); }

  // Delivers in one of so many turns only.
  void set_slowness(unsigned turns) { slowness_ = turns; }

  std::size_t pending() const { return pending_.size(); }

  // Adds a launch to the grid that delivers until the others, of `running` threads, have ended;
  // `delivers_all`: and everything has arrived.
  void attach(on_host::Grid& grid, const unsigned& running, bool delivers_all) {
    grid.add(1, 32, [this, &running, delivers_all](unsigned) {
      while (running != 0 || (delivers_all && !pending_.empty())) {
        if (on_host::Grid::thread() == 0 && random_() % slowness_ == 0) {
          for (std::size_t tries = (pending_.size() + 1) / 2; tries > 0 && !pending_.empty(); --tries)
            deliver_one();
        }
        on_host::Grid::yield();
      }
    });
  }

 private:
  void deliver_one() {
    const auto at = pending_.begin() + static_cast<std::ptrdiff_t>(random_() % pending_.size());
    if (at->bytes > 0) std::memcpy(at->to, at->from, static_cast<std::size_t>(at->bytes));
    if (at->flag != nullptr) store_release_sys(at->flag, at->value);
    pending_.erase(at);
  }

  std::mt19937_64 random_;
  std::vector<Transfer> pending_;
  unsigned slowness_ = 1;
};

// Mistakes that a policy may make.
enum class PutMistake {
  none,
  flag_before_put  // the flag of a message does not wait for its bytes
};

// The transport policy over such a network.
struct LatePuts : Pretended {
  Network* network;
  PutMistake mistake = PutMistake::none;

  __device__ void put(const LaneView& lane, int peer, std::byte* place, const std::byte* from,
                      int bytes) const {
    put_with_signal(lane, peer, place, from, bytes, {nullptr, 0});
  }
  __device__ void put_with_signal(const LaneView& lane, int peer, std::byte* place, const std::byte* from,
                                  int bytes, const FlagValue& announced) const {
    const auto [flag, value] = announced;
    if (!is_staged(peer)) {
      if (flag == nullptr) return PlainStores::put(lane, peer, place, from, bytes);
      return PlainStores::put_with_signal(lane, peer, place, from, bytes, announced);
    }
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
    Network::Transfer message{mapped_at(lane, peer, place), from, bytes,
                              flag == nullptr ? nullptr : mapped_at(lane, peer, flag), value};
    if (mistake == PutMistake::flag_before_put && flag != nullptr) {
      network->send({.flag = message.flag, .value = value});
      message.flag = nullptr;
    }
    network->send(message);
  }
  __device__ void signal(const LaneView& lane, int peer, Flag* flag, std::uint64_t value) const {
    if (!is_staged(peer)) return PlainStores::signal(lane, peer, flag, value);
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
    network->send({.flag = mapped_at(lane, peer, flag), .value = value});
  }
};

}  // namespace ferry::cuda
