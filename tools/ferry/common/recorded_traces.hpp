// Recorded traces on this machine.
#pragma once

#include <string>
#include <vector>

namespace ferry::app {

struct RecordedTrace {
  std::string name;      // folder/name, as open_trace takes it
  bool weights = false;  // recorded too
};

// Under the folder that FERRY_TRACES names, by name. None if it is not set or is no folder.
std::vector<RecordedTrace> recorded_traces();

// The first that has weights, or else the first; empty if there is none.
std::string default_recorded_trace();

// Why recorded_traces() found none: FERRY_TRACES is not set, names no folder, or one without traces.
std::string why_no_traces();

// One line on stderr if FERRY_TRACES is set and leads to no trace: what is played instead was not meant.
void warn_of_missing_traces();

// One sentence on where recorded traces can be had.
extern const char* const kWhereTracesAre;

}  // namespace ferry::app
