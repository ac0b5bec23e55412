// Finds the recorded routing traces on this machine, in the folder that FERRY_TRACES names.
#pragma once

#include <string>
#include <vector>

namespace ferry::app {

struct RecordedTrace {
  std::string name;      // folder/name, as open_trace takes it
  bool weights = false;  // the weights were recorded too
};

// All traces in the folder, ordered by name. Empty if FERRY_TRACES is not set or names no folder.
std::vector<RecordedTrace> recorded_traces();

// The first trace with weights, otherwise the first; empty if there is none.
std::string default_recorded_trace();

// Why recorded_traces() is empty: FERRY_TRACES is not set, names no folder, or names one without traces.
std::string why_no_traces();

// Prints one line on stderr if FERRY_TRACES is set and leads to no trace, because the user then expects a
// recorded trace and a synthesised one is used instead.
void warn_of_missing_traces();

// A synthesised trace's name without its parameters, such as synth:decode; another name as it is.
std::string short_name(const std::string& trace);

// One sentence on how to get recorded traces.
std::string how_to_get_traces();

}  // namespace ferry::app
