// Routing traces in C.
#include "ferry/trace.hpp"

#include <algorithm>
#include <span>
#include <vector>

#include "capi/boundary.hpp"

struct ferry_trace {
  ferry::Trace trace;
};

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
    if (!trace.weights.empty()) c.weights = trace.weights.data();
    c.sequences = static_cast<std::int64_t>(trace.sequence_lengths.size());
    if (c.sequences > 0) c.sequence_lengths = trace.sequence_lengths.data();
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

ferry_status ferry_trace_expert_counts(const ferry_trace* trace, int layer, int64_t* counts) {
  return guarded([&] {
    const std::vector<std::int64_t> found = expert_counts(required(trace, "trace").trace, layer);
    std::copy(found.begin(), found.end(), &required(counts, "counts"));
  });
}

ferry_status ferry_rank_counts(const int64_t* counts, int experts, const int32_t* expert_rank, int ranks,
                               int64_t* per_rank) {
  return guarded([&] {
    required(counts, "counts");
    required(per_rank, "rank_counts");
    Placement placement = Placement::blocks(experts, ranks);
    if (expert_rank != nullptr) {
      std::vector<ExpertLocation> locations;
      std::vector<int> held(static_cast<std::size_t>(ranks), 0);
      for (int e = 0; e < experts; ++e) {
        const std::int32_t rank = expert_rank[e];
        const bool known = rank >= 0 && rank < ranks;  // else table() refuses it
        locations.push_back({rank, known ? held[static_cast<std::size_t>(rank)]++ : 0});
      }
      placement = Placement::table(std::move(locations), ranks);
    }
    const std::span given(counts, static_cast<std::size_t>(experts));
    const std::vector<std::int64_t> found = rank_counts(given, placement);
    std::copy(found.begin(), found.end(), per_rank);
  });
}

ferry_status ferry_statistics_of_load(const int64_t* counts, int experts, ferry_load_statistics* statistics) {
  return guarded([&] {
    required(counts, "counts");
    if (experts < 1) throw UsageError(str("experts = ", experts, ", must be 1 or more"));
    const LoadStatistics found = load_statistics({counts, static_cast<std::size_t>(experts)});
    ferry_load_statistics c{};
    c.routes = found.routes;
    c.max = found.max;
    c.p99 = found.p99;
    c.p90 = found.p90;
    c.p50 = found.p50;
    c.p10 = found.p10;
    c.min = found.min;
    c.sigma_ln = found.sigma_ln;
    c.gini = found.gini;
    c.idle = found.idle;
    write_sized(statistics, c, "ferry_load_statistics");
  });
}

}  // extern "C"

}  // namespace ferry::capi
