// What ranks must agree on, and the errors if they do not: the arguments of a call, and whether a
// construction step succeeded.
#pragma once

#include <cstdint>
#include <exception>
#include <span>
#include <string>

#include "base/errors.hpp"
#include "ferry/error.hpp"
#include "ferry/group.hpp"

namespace ferry {

// An argument of a call that every rank must pass alike. The name has static storage. Ranks compare values by
// position, so an operation always lists its options in the same order.
struct ComparedOption {
  const char* name;
  std::int64_t value;
  std::string (*name_of)(std::int64_t value) = nullptr;  // for messages; null: the number itself
};

// "NAME is VALUE on rank R and VALUE on rank P", and the remedy.
std::string describe_difference(const ComparedOption& option, int rank, std::int64_t mine, int peer,
                                std::int64_t theirs);

// Throws UsageError: rank `with` gave the optional argument, and rank `without` did not.
[[noreturn]] void throw_given_on_some(const char* operation, const char* argument, int with, int without);

inline constexpr int kMaxComparedOptions = 22;

// An epoch, and a rank that is in it.
struct EpochOfRank {
  int rank;
  std::int64_t epoch;
};
// Throws UsageError: the call header of rank `theirs` is of another epoch.
[[noreturn]] void throw_other_epoch(Operation operation, std::uint64_t call, const EpochOfRank& mine,
                                    const EpochOfRank& theirs);

// The call of rank `rank`.
struct CallTerms {
  int rank;
  std::uint32_t epoch;
  std::uint64_t call;
  Operation operation;
  std::span<const ComparedOption> options;
};

// What the call header of another rank says of its call.
struct PeerCall {
  int rank;
  std::uint32_t epoch;
  Operation operation;
  std::span<const std::int64_t> options;
};

// Throws UsageError if the peer's epoch, operation or options differ from this rank's.
void require_same_call(const CallTerms& mine, const PeerCall& peer);

// Throws the error with which `peer` has refused the call.
[[noreturn]] void throw_refusal(int peer, Operation operation, std::uint64_t call,
                                const ErrorRecord& refusal);

// Collective. Throws UsageError on every rank unless all of them request the same size of symmetric memory.
void require_same_size(const Rank& rank, std::int64_t bytes);

// Collective. Every rank passes its error (null: none) and throws the error of the lowest rank that has one.
void throw_first_error(const Rank& rank, const std::exception_ptr& mine);

// Collective. Runs `step` on this rank and returns if it succeeded on all ranks. Otherwise every rank throws
// the error of the lowest rank on which it failed.
template <class Step>
void run_on_all_ranks(const Rank& rank, Step step) {
  std::exception_ptr error;
  try {
    step();
  } catch (...) {
    error = std::current_exception();
  }
  throw_first_error(rank, error);
}

}  // namespace ferry
