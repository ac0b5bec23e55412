// The measured constants of the cost model: what they are, their built-in values, and their file.
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tools/ferry/limits/gpu_limits.hpp"

namespace ferry::app {

// docs/model.md has the formula that each is part of.
enum class Constant : int {
  dispatch_few,   // start of a dispatch of few tokens
  dispatch_many,  // start of a dispatch of many tokens
  combine_ll,     // start of a combine whose sums are LL packets
  combine_few,    // start of any other combine of few tokens
  combine_many,   // start of a combine of many tokens
  doubling,       // added to each start for every doubling of the ranks
  plan,           // added by a dispatch with an existing plan
  phases,         // added by a call in two phases
  eager,          // added for each kernel that is launched without a graph
  store,          // dispatch: bytes that an SM stores
  read,           // combine: bytes of expert rows that an SM reads and adds
  sum,            // combine, partial: bytes of sums that an SM sends and adds at their source
  row,            // combine, exact and unreduced: bytes of rows that an SM sends and adds or stores
  fp8,            // quantising 7,168 bf16 values to fp8 or mxfp8
  mxfp4,          // ... to mxfp4
  nvfp4,          // ... to nvfp4
  nvfp4_token,    // ... to nvfp4-token
  memory,         // bytes that a GPU reads and writes in its memory
  count_
};
inline constexpr auto kConstants = static_cast<std::size_t>(Constant::count_);

struct ConstantEntry {
  Constant constant;
  const char* name;
  double value;  // built in
  const char* unit;
  const char* meaning;
};

// In the order of Constant.
const std::array<ConstantEntry, kConstants>& constant_table();

class Constants {
 public:
  Constants();  // the built-in values

  double operator[](Constant constant) const { return values_[static_cast<std::size_t>(constant)]; }
  double& operator[](Constant constant) { return values_[static_cast<std::size_t>(constant)]; }

 private:
  std::array<double, kConstants> values_;
};

// A point of a calibration, by which a check knows and leaves it out.
struct CalibratedPoint {
  std::string work;
  int ranks = 0, tokens = 0;
  double us = 0;  // measured
};

// Everything that a calibration yields.
struct Model {
  Constants constants;
  GpuLimits limits;                         // of the machine
  std::string source;                       // where the constants come from
  std::vector<CalibratedPoint> calibrated;  // the points used
  std::vector<std::string> kept;            // constants that the points did not determine
};

// Constants and limits from the records in bench/results.
Model built_in_model();

nlohmann::ordered_json json_of(const Model& model);

// @throws UsageError  not a file that json_of() has made
Model read_model(const std::string& path);

}  // namespace ferry::app
