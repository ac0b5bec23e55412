#include "tools/ferry/bench/options.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>

#include "ferry/error.hpp"
#include "tools/ferry/common/arguments.hpp"
#include "tools/ferry/common/recorded_traces.hpp"

namespace ferry::app {

namespace {

int parse_number(const std::string& text, const std::string& whole) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value < 1) {
    throw UsageError(fmt::format("--tokens {}: '{}' is no positive number", whole, text));
  }
  return value;
}

template <class Value>
CLI::Option* add_list(CLI::App& command, const char* name, std::vector<Value>& values, const char* about) {
  return command.add_option(name, values, about)->delimiter(',')->type_name("LIST");
}

void add_names(CLI::App& command, const char* name, std::vector<std::string>& values,
               const std::vector<std::string>& known, const char* about) {
  add_list(command, name, values, about)->check(CLI::IsMember(known).description(""));
}

void add_device_options(CLI::App& command, BenchOptions& options) {
  add_names(command, "--work", options.works, {"dispatch", "plan", "combine", "pair", "metadata", "nccl"},
            "cuda: what is timed, of dispatch (default), plan\n(dispatch from a kept plan), combine "
            "(default), pair\n"
            "(dispatch and combine), metadata (counts of a step),\nnccl (all-to-all-v of sorted rows, to "
            "compare with)");
  add_names(command, "--weights", options.weights, {"with", "without"},
            "cuda: of with (default): they travel and are applied,\nwithout");
  add_names(command, "--launch", options.launches, {"graph", "eager"},
            "cuda: of graph (default), eager: call by call, with the\ntime of the calling thread");
  add_names(command, "--form", options.forms, {"fused", "halves"},
            "cuda: of fused (default), in_phases: send half and receive\nhalf, one after the other");
  add_list(command, "--sms", options.sms, "cuda: most SMs of a call, default 0: no limit")
      ->check(CLI::Range(0, 1024).description(""));
  add_text(command, "--nccl", options.nccl,
           "cuda: libnccl.so.2; default: found by the loader, or in\na Python installation", "PATH");
}

}  // namespace

void add_bench_options(CLI::App& command, BenchOptions& options) {
  command
      .add_option("--trace", options.traces,
                  "a recorded trace (folder/name or path.npy), or\nsynth:decode, synth:prefill, "
                  "synth:uniform; may be repeated;\n"
                  "default: synth:uniform, synth:decode and the first\nrecorded one under FERRY_TRACES")
      ->type_name("NAME");
  add_text(command, "--tokens", options.tokens,
           "of a rank in a call: 1:8192 doubles, 1,5,64 is a list;\ndefault 1:2048", "LIST");
  add_list(command, "--ranks", options.ranks, "ranks on this machine, default 4")
      ->check(CLI::Range(1, 1024).description(""));
  command
      .add_option("--backend", options.backend,
                  "cpu (default) or cuda: ranks are threads that take the\nGPUs in turn")
      ->check(CLI::IsMember({"cpu", "cuda"}).description(""))
      ->type_name("NAME");
  command.add_flag("--processes", options.processes, "each rank is a process instead of a thread");
  add_list(command, "--format", options.formats,
           "of bf16 (default), fp16, fp32, and fp8, followed by\nany of -columns, -pow2, -packed");
  add_names(command, "--layout", options.layouts, {"expert_major", "expert_padded", "rank_major"},
            "of expert_major (default), expert_padded, rank_major");
  add_names(command, "--reduction", options.reductions, {"partial", "exact", "unreduced"},
            "of partial (default), exact, unreduced");
  add_device_options(command, options);
  add_count(command, "--hidden", options.hidden, "columns of a token, default 7168");
  add_count(command, "--experts", options.experts,
            "of synthesised traces; default: as the first recorded\none, or else 256");
  add_number(command, "--top-k", options.top_k,
             "of synthesised traces; default: as the first recorded\none, or else 8", 1, kMaxTopK);
  add_count(command, "--repetitions", options.repetitions, "of every point, default 50");
  add_seed(command, options.seed, "of synthesised traces, default 1");
  add_output(command, "--json", options.json, "the report as JSON; - is stdout, instead of the table");
}

std::vector<int> parse_sweep(const std::string& text) {
  std::vector<int> values;
  if (const std::size_t colon = text.find(':'); colon != std::string::npos) {
    const std::int64_t last = parse_number(text.substr(colon + 1), text);
    for (std::int64_t value = parse_number(text.substr(0, colon), text); value <= last; value *= 2) {
      values.push_back(static_cast<int>(value));
    }
    if (values.empty()) throw UsageError(fmt::format("--tokens {}: the last is below the first", text));
    return values;
  }
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    values.push_back(parse_number(text.substr(begin, end - begin), text));
    begin = end + 1;
  }
  return values;
}

std::vector<Trace> open_bench_traces(const BenchOptions& options) {
  std::vector<std::string> names = options.traces;
  if (names.empty()) {
    names = {"synth:uniform", "synth:decode"};
    warn_of_missing_traces();
    if (const std::string recorded = default_recorded_trace(); !recorded.empty()) names.push_back(recorded);
  }
  std::vector<Trace> traces(names.size());
  const Trace* recorded = nullptr;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (names[i].empty()) throw UsageError("--trace: must not be empty");
    if (names[i].starts_with("synth:")) continue;
    traces[i] = open_trace(names[i]);
    if (recorded == nullptr) recorded = &traces[i];
  }
  TraceOptions how;
  how.synth.seed = options.seed;
  if (recorded != nullptr) {
    how.synth.experts = recorded->experts;
    how.synth.top_k = recorded->top_k;
  }
  if (options.experts > 0) how.synth.experts = options.experts;
  if (options.top_k > 0) how.synth.top_k = options.top_k;
  const std::vector<int> tokens = parse_sweep(options.tokens);
  how.synth.tokens = std::int64_t{*std::max_element(tokens.begin(), tokens.end())} *
                     *std::max_element(options.ranks.begin(), options.ranks.end());
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (names[i].starts_with("synth:")) traces[i] = open_trace(names[i], how);
  }
  return traces;
}

}  // namespace ferry::app
