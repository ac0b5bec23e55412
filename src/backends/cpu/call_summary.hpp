// An optional argument that all ranks give or none does. A rank that has nothing to give it for (no tokens,
// no rows) may do either, so pointers cannot simply be compared: every rank says what it did, and all see the
// same answers.
#pragma once

#include <cstdint>

#include "base/text.hpp"
#include "ferry/error.hpp"

namespace ferry::cpu {

class Presence {
 public:
  enum Word : std::int32_t { absent = 0, given = 1, either = 2 };

  static Word word(bool is_given, bool matters) { return !matters ? either : is_given ? given : absent; }

  void note(int rank, std::int32_t word) {
    if (word == given && first_given_ < 0) first_given_ = rank;
    if (word == absent && first_absent_ < 0) first_absent_ = rank;
  }
  bool anywhere() const { return first_given_ >= 0; }

  // Call after every rank's word has been noted.
  void check(const char* operation, const char* argument) const {
    if (first_given_ < 0 || first_absent_ < 0) return;
    throw UsageError(str(operation, ": the ranks' options differ: ", argument, " given on rank ",
                         first_given_, " and not on rank ", first_absent_));
  }

 private:
  int first_given_ = -1;
  int first_absent_ = -1;
};

}  // namespace ferry::cpu
