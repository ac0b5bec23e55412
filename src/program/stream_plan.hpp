// On which stream each step of a program runs, and where a stream waits for another.
#pragma once

#include <vector>

#include "ferry/program.hpp"

namespace ferry {

// The streams of a program are numbered here from 0, the caller's, without gaps.
struct StreamPlan {
  struct Step {
    int stream = 0;
    std::vector<int> waits_for{};  // steps on other streams, which the step's stream waits for before it
    bool awaited = false;          // another stream waits for this step
  };

  int streams = 1;
  std::vector<Step> steps;
  // The steps that stream 0 waits for at the end: the last ones of streams that it has not waited for before.
  std::vector<int> ends;
};

// A run begins with every other stream waiting for stream 0. A stream waits for a step only if one of its
// steps takes a value of that step or comes after it, and no earlier wait has covered it.
StreamPlan plan_streams(const Program& program);

}  // namespace ferry
