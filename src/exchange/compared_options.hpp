// The options of a call that every rank must pass alike: one list for all backends, which compare values by
// index and look up the name of the one that differs.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "exchange/backend.hpp"
#include "ferry/error.hpp"
#include "group/channel.hpp"

namespace ferry {

class ComparedOptions {
 public:
  void add(const char* name, std::int64_t value, std::string (*name_of)(std::int64_t) = nullptr) {
    options_[count_++] = {name, value, name_of};
  }

  std::span<const ComparedOption> values() const { return {options_.data(), count_}; }
  void add(const ComparedOption& option) { options_[count_++] = option; }

  operator std::span<const ComparedOption>() const { return values(); }

 private:
  std::array<ComparedOption, kMaxComparedOptions> options_{};
  std::size_t count_ = 0;
};

ComparedOption type_option(const char* name, DType type);

// What the arguments alone decide. Backends append the plan (add_plan) last, because a device backend learns
// only in the kernel which call made it.
ComparedOptions options_of(const Config& config, const DispatchCall& call);
ComparedOptions options_of(const CombineCall& call);

// The index, among the options of a dispatch, of the hash of replicated input.
int input_hash_option(const ComparedOptions& options);

// The number of the call that made the plan, 0 without one: equal on every rank that uses plans of one
// dispatch.
void add_plan(const Plan& plan, ComparedOptions* options);

// Option `index` of such a call, the plan included; its value means nothing.
ComparedOption option_at(Operation operation, int index);

}  // namespace ferry
