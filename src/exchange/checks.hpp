// Checks of a call's arguments that the host can make before the call starts, which do not look at the data;
// and the errors that a call's findings become.
#pragma once

#include "exchange/backend.hpp"
#include "format/parts.hpp"

namespace ferry {

// The memory that plans are in. The host cannot read a plan in device memory: the device checks it during the
// call.
enum class PlanIn { host, device };

// Each throws UsageError or UnsupportedError, with the numbers that matter. `config` is complete.
// `call`: its name in messages.
void check_ids(const Config& config, int rank, const char* call, const Ids& ids, std::int64_t tokens);
void check_dispatch(const Config& config, int rank, const DispatchCall& call, PlanIn plan_in);
void check_combine(const Config& config, int rank, const CombineCall& call, bool split, PlanIn plan_in);
void check_route_values(const Config& config, int rank, const RouteValuesCall& call, PlanIn plan_in);

// `most`: NumberCall's.
void check_number(Operation operation, int rank, std::int32_t number, std::int32_t most);

// Throws unless this rank can use the plan: right shape, right rank, undamaged header. `config` is complete.
void check_plan(const Config& config, int rank, const Plan& plan, PlanIn plan_in);

// True if receivers encode the rows, with a scale for each expert.
bool by_expert(const DispatchCall& call);

// The parts of a row in the call's messages, and as it is received.
PartList message_parts(const Config& config, const DispatchCall& call);
PartList received_parts(const Config& config, const DispatchCall& call);

// Whether the format marks a block whose scale cannot be formed, with the scale 7F.
bool marks_bad_scales(const Format& format);

// Checks global_scale and input_scales. Throws UsageError or UnsupportedError.
void check_scales(const Config& config, int rank, const DispatchCall& call);

// Turns the findings of calls into an error: throws OverflowError, BadIdError, BadSourceError or UsageError,
// the first that applies; nothing if there are no findings.
void raise(const CallDiagnostics& found, const Config& config);

}  // namespace ferry
