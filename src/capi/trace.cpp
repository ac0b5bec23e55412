#include "ferry/trace.hpp"

#include <algorithm>

#include "capi/boundary.hpp"
#include "capi/handles.hpp"

namespace ferry::capi {

extern "C" {

ferry_status ferry_trace_open(const char* name, const char* directory, int experts, ferry_trace** trace) {
  return guarded([&] {
    required(name, "name");
    required(trace, "trace");
    const TraceOptions options{.directory = directory != nullptr ? directory : "", .experts = experts};
    *trace = new ferry_trace{open_trace(name, options)};
  });
}

void ferry_trace_destroy(ferry_trace* trace) {
  delete trace;
}

ferry_status ferry_trace_save(const ferry_trace* trace, const char* prefix) {
  return guarded([&] { save_trace(required(trace, "trace").trace, &required(prefix, "prefix")); });
}

ferry_status ferry_trace_query(const ferry_trace* handle, ferry_trace_info* info) {
  return guarded([&] {
    const Trace& trace = required(handle, "trace").trace;
    ferry_trace_info c{};
    c.name = trace.name.c_str();
    c.source = trace.source.c_str();
    c.layers = trace.layers;
    c.top_k = trace.top_k;
    c.experts = trace.experts;
    c.tokens = trace.tokens;
    c.ids = trace.ids.data();
    c.weights = trace.weights.data();
    write_sized(info, c, "ferry_trace_info");
  });
}

ferry_status ferry_trace_partition(const ferry_trace* handle, const ferry_trace_partition_args* given) {
  return guarded([&] {
    const Trace& trace = required(handle, "trace").trace;
    const auto args = read_sized(given, "ferry_trace_partition_args");
    required(args.ids, "ids");
    const TracePartition part = partition(trace, {.layer = args.layer,
                                                  .rank = args.rank,
                                                  .ranks = args.ranks,
                                                  .tokens_per_rank = args.tokens_per_rank,
                                                  .step = args.step});
    std::copy(part.ids.begin(), part.ids.end(), args.ids);
    if (args.weights != nullptr) std::copy(part.weights.begin(), part.weights.end(), args.weights);
    if (args.first_token != nullptr) *args.first_token = part.first_token;
  });
}

}  // extern "C"

}  // namespace ferry::capi
