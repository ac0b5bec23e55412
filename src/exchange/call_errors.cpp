#include "exchange/call_errors.hpp"

#include <cmath>
#include <string>

#include "base/text.hpp"
#include "ferry/error.hpp"

namespace ferry {
namespace {

std::string describe(const Overflow& overflow, const Config& config) {
  const bool by_expert = config.layout == Layout::expert_padded;
  const char* unit = config.layout == Layout::rank_major ? "rows"
                     : config.shared_experts > 0         ? "routes and shared rows"
                                                         : "routes";
  // The default capacity has room for any routing, unless a token lists an expert twice.
  const std::string remedy =
      config.capacity == 0
          ? "some token lists an expert more than once: configure repeats = true, with which the default "
            "capacity has room for that"
          : str("configure capacity = ", overflow.needed,
                " or more; 0 has room for any routing, with repeats = "
                "true also for tokens that list an expert more than once");
  return str("capacity of ", counted(overflow.capacity, "row"), by_expert ? " for each expert" : "",
             " exceeded: ", by_expert ? "the fullest expert of " : "", "rank ", overflow.rank, " needs ",
             overflow.needed, "; ", unit, " dropped on all ranks: ", overflow.dropped, "; ", remedy);
}

std::string describe(const BadScale& bad) {
  if (!bad.scale) {  // device backends do not tell the format either
    return str(
        "dispatch: on rank ", bad.rank,
        " global_scale (or with input_scales a scale of an expert) is not positive and finite, or so "
        "large that the scale of a block of nvfp4 overflows: with nvfp4 pass largest finite |x| / 2688, "
        "with fp8 largest |x| / 448, with mxfp8 1; the blocks of nvfp4 concerned have scale 7F and "
        "values 0");
  }
  const bool usable = *bad.scale > 0 && std::isfinite(*bad.scale);
  return str("dispatch: ", bad.expert < 0 ? "global_scale" : str("input_scales[", bad.expert, "]"), " = ",
             *bad.scale, " on rank ", bad.rank,
             usable ? " is so large that the scale of a block overflows" : ", must be positive and finite",
             ": pass largest finite |x| / 2688", bad.expert < 0 ? ", or choose nvfp4-token" : "",
             "; the blocks concerned have scale 7F and values 0");
}

std::string describe(const CallDiagnostics& diagnostics, const Config& config) {
  std::string text;
  auto add = [&](const std::string& part) { text += text.empty() ? part : "; " + part; };
  if (diagnostics.overflow.dropped > 0) add(describe(diagnostics.overflow, config));
  if (const BadId& b = diagnostics.bad_id; b.count > 0) {
    add(str("dispatch: ", counted(b.count, "expert id"), " out of range, must be -1 (masked) to ",
            config.experts - 1, "; the first on rank ", b.rank, ", token ", b.token, ", slot ", b.slot,
            ": id ", b.id, "; skipped"));
  }
  if (const BadSource& b = diagnostics.bad_source; b.count > 0) {
    add(str(b.count, " entries of the plan on rank ", b.rank, " point outside the exchange",
            ", the first at index ", b.index, "; they were skipped: the plan is damaged"));
  }
  if (diagnostics.bad_scale.rank >= 0) add(describe(diagnostics.bad_scale));
  return text;
}

}  // namespace

void raise(const CallDiagnostics& found, const Config& config) {
  if (found.overflow.dropped > 0) throw OverflowError(describe(found, config), found.overflow);
  if (found.bad_id.count > 0) throw BadIdError(describe(found, config), found.bad_id);
  if (found.bad_source.count > 0) throw BadSourceError(describe(found, config), found.bad_source);
  if (found.bad_scale.rank >= 0) throw UsageError(describe(found, config));
}

}  // namespace ferry
