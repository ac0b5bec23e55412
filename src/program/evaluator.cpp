#include "ferry/evaluator.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <ranges>
#include <utility>
#include <vector>

#include "base/errors.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"
#include "program/compiled.hpp"
#include "program/steps.hpp"

namespace ferry {

namespace {

// Bytes of a row of tokens, ids or weights for an exchange of this configuration.
std::int64_t row_bytes(const ProgramValue& rows, const Config& config) {
  if (rows.kind == ValueKind::tokens) return config.hidden * bytes_of(rows.type);
  return config.top_k * (rows.kind == ValueKind::ids ? bytes_of(rows.id_type) : 4);
}

// Throws UsageError for tokens whose rows, of `row` bytes, are not contiguous.
void require_dense(const ProgramValue& rows, std::int64_t row) {
  if (rows.kind == ValueKind::tokens && rows.stride != 0 && rows.stride != row)
    throw UsageError(str("the rows are ", rows.stride, " bytes apart, dense rows of ", row, " are needed"));
}

bool ends_group(const Error& error) {
  return error.code() == ErrorCode::timeout || error.code() == ErrorCode::peer_lost;
}

// The operation of the call that a step with a lane makes.
Operation operation_of(StepKind kind) {
  if (is_dispatch(kind)) return Operation::dispatch;
  if (is_combine(kind)) return Operation::combine;
  if (kind == StepKind::all_gather_v) return Operation::all_gather_v;
  return kind == StepKind::reduce_scatter_v ? Operation::reduce_scatter_v : Operation::metadata;
}

}  // namespace

class Evaluator::State {
 public:
  State(Program program, const ProgramExchanges& exchanges, ProgramFunctions functions)
      : program_(std::move(program)),
        functions_(std::move(functions)),
        compiled_(compile(program_, exchanges, functions_)),
        streams_(compiled_.streams, compiled_.device.get()),
        values_(compiled_.values.size()),
        sent_(compiled_.steps.size()) {
    for (std::size_t i = 0; i < values_.size(); ++i) values_[i].kind = compiled_.values[i].kind;
    for (const CompiledStep& step : compiled_.steps) {
      Operands& operands = operands_.emplace_back();
      for (const int input : step.inputs) operands.inputs.push_back(&value(input));
      for (const int output : step.outputs) operands.outputs.push_back(&value(output));
    }
    for (const int output : compiled_.outputs) outputs_.push_back(&value(output));
  }

  const Program& program() const { return program_; }

  void set_observer(std::function<void(std::size_t, Stream)> observer) { observer_ = std::move(observer); }

  std::span<const ProgramValue* const> run(std::span<const ProgramValue> inputs, Stream stream) {
    require_no_obstacle(stream);
    std::fill(sent_.begin(), sent_.end(), false);
    step_ = 0;
    try {
      phase_ = Phase::binding;
      streams_.begin(stream);
      bind(inputs);
      for (; step_ < compiled_.steps.size(); ++step_) {
        phase_ = Phase::before_call;
        if (observer_) observer_(step_, this->stream());
        streams_.before(step_);
        run_step(compiled_.steps[step_]);
        streams_.after(step_);
      }
      streams_.end();
      if (observer_) observer_(step_, stream);
    } catch (const Error& error) {
      // A function may throw such an error of another group: then this one goes on.
      ends_group(error) && phase_ != Phase::in_function ? streams_.join_all() : refuse_rest(error.what());
      if (phase_ == Phase::in_function) throw;
      ErrorRecord::of(error).raise_with(where() + error.what());
    } catch (const std::exception& error) {
      refuse_rest(error.what());
      throw;
    } catch (...) {
      refuse_rest("an exception that does not derive from std::exception");
      throw;
    }
    return outputs_;
  }

 private:
  // Progress of a step. Once it is in the call of an exchange, the call ends alike on all ranks.
  enum class Phase { binding, before_call, in_call, in_function };

  struct Operands {
    std::vector<const ProgramValue*> inputs;
    std::vector<ProgramValue*> outputs;
  };

  ProgramValue& value(int number) { return values_[static_cast<std::size_t>(number)]; }
  const CompiledValue& compiled(int number) const {
    return compiled_.values[static_cast<std::size_t>(number)];
  }

  std::string where() const {
    if (phase_ == Phase::binding) return str("program ", program_.name, ": ");
    return str("program ", program_.name, ", step ", compiled_.steps[step_].name, ": ");
  }

  // Throws before anything is enqueued if a step cannot be captured.
  void require_no_obstacle(Stream stream) const {
    if (compiled_.capture_obstacle < 0 || !compiled_.device->is_captured(stream)) return;
    const CompiledStep& step = compiled_.steps[static_cast<std::size_t>(compiled_.capture_obstacle)];
    throw UnsupportedError(str(
        "program ", program_.name, ", step ", step.name, ": cannot be captured into a CUDA graph, because ",
        step.kind == StepKind::wait ? "the host waits in it: leave it out, and call Exchange::synchronize() "
                                      "after the replay"
                                    : "the host reads how much the backend collective receives: use the "
                                      "backend cuda"));
  }

  void bind(std::span<const ProgramValue> inputs) {
    if (inputs.size() != program_.inputs.size())
      throw UsageError(str("run() was given ", counted(inputs.size(), "input"), ", the program has ",
                           program_.inputs.size()));
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const ProgramName& input = program_.inputs[i];
      if (inputs[i].kind != input.kind)
        throw UsageError(str("input ", input.name, " is of kind ", to_string(inputs[i].kind),
                             ", the program says ", to_string(input.kind)));
      values_[i] = inputs[i];
    }
  }

  void run_step(const CompiledStep& step) {
    switch (step.kind) {
      case StepKind::dispatch:
      case StepKind::dispatch_send:
        return run_dispatch(step);
      case StepKind::dispatch_receive:
        phase_ = Phase::in_call;
        set_received(step, step.exchange->dispatch_receive(call_of(step)),
                     compiled_.steps[static_cast<std::size_t>(step.sender)]);
        return;
      case StepKind::combine:
      case StepKind::combine_send:
        return run_combine(step);
      case StepKind::combine_receive:
        phase_ = Phase::in_call;
        step.exchange->combine_receive(call_of(step));
        return;
      case StepKind::metadata:
        return run_metadata(step);
      case StepKind::call:
        return run_function(step);
      case StepKind::wait:
        phase_ = Phase::in_call;
        step.exchange->synchronize(call_of(step));
        step.exchange->check(step.lane);
        value(step.outputs.front()) = value(step.inputs.front());
        return;
      case StepKind::part:
        return take_part(step);
      case StepKind::join:
        return join(step);
      case StepKind::all_gather_v:
        return gather(step);
      case StepKind::reduce_scatter_v:
        return scatter(step);
    }
  }

  CallOptions call_of(const CompiledStep& step) const {
    return {.lane = step.lane, .stream = stream(), .sm_limit = step.sm_limit};
  }

  void run_dispatch(const CompiledStep& step) {
    const ProgramValue &rows = value(step.inputs[0]), &routes = value(step.inputs[1]);
    if (routes.rows != rows.rows)
      throw UsageError(str("the ", to_string(routes.kind), " are of ", counted(routes.rows, "token"),
                           ", the rows of ", rows.rows));
    const float* weights = step.inputs.size() > 2 ? weights_of(step.inputs[2], rows.rows) : nullptr;
    const Tokens tokens = Tokens::rows(rows.data, rows.rows, rows.type, rows.stride);
    const DispatchOptions options{.call = call_of(step), .weighted = step.inputs.size() > 2};
    const auto run = [&](const auto& given) {
      phase_ = Phase::in_call;
      if (step.kind == StepKind::dispatch)
        return set_received(step, step.exchange->dispatch(tokens, given, weights, options), step);
      step.exchange->dispatch_send(tokens, given, weights, options);
      sent_[step_] = true;
    };
    if (routes.kind == ValueKind::received) return run(routes.received.plan);
    routes.id_type == IdType::int64 ? run(Ids(static_cast<const std::int64_t*>(routes.data)))
                                    : run(Ids(static_cast<const std::int32_t*>(routes.data)));
  }

  void set_received(const CompiledStep& step, const DispatchResult& received, const CompiledStep& sender) {
    ProgramValue& made = value(step.outputs.front());
    made.received = received;
    made.rows = value(sender.inputs.front()).rows;
  }

  const float* weights_of(int number, std::int64_t tokens) {
    const ProgramValue& weights = value(number);
    if (weights.rows != tokens)
      throw UsageError(str("the weights are of ", counted(weights.rows, "token"), ", the rows of ", tokens));
    return static_cast<const float*>(weights.data);
  }

  void run_combine(const CompiledStep& step) {
    const ProgramValue &rows = value(step.inputs[0]), &received = value(step.inputs[1]);
    CombineOptions options{.call = call_of(step)};
    if (step.inputs.size() > 2) {
      const ProgramValue& third = value(step.inputs[2]);
      options.topk_weighted = third.kind != ValueKind::received;
      if (options.topk_weighted)
        options.topk_weights = weights_of(step.inputs[2], received.rows);
      else
        options.row_weights = third.received.weight;
    }
    const Outputs outputs{rows.data, rows.type, rows.stride};
    prepare(step.result, received.rows);
    const Result result{value(step.result).data, value(step.result).type};
    phase_ = Phase::in_call;
    if (step.kind == StepKind::combine)
      return step.exchange->combine(outputs, received.received.plan, result, options);
    step.exchange->combine_send(outputs, received.received.plan, result, options);
    sent_[step_] = true;
  }

  void run_metadata(const CompiledStep& step) {
    const ProgramValue& count = value(step.inputs.front());
    ProgramValue& made = value(step.outputs.front());
    StepMetadata* into = &made.metadata;
    if (compiled_.device != nullptr) {
      into = reinterpret_cast<StepMetadata*>(compiled(step.outputs.front()).memory);
      made.device_metadata = into;
    }
    phase_ = Phase::in_call;
    const bool on_device = count.device_count != nullptr;
    step.exchange->metadata(on_device ? Count(count.device_count) : Count(count.count), call_of(step), into);
  }

  void gather(const CompiledStep& step) {
    const ProgramValue& rows = value(step.inputs.front());
    const int number = step.outputs.front();
    const std::int64_t row = row_bytes(rows, step.exchange->config());
    require_dense(rows, row);
    prepare(number, 0);
    ProgramValue& made = value(number);
    made.type = rows.type;
    made.id_type = rows.id_type;
    phase_ = Phase::in_call;
    const std::int64_t most = compiled(number).most_rows;
    const std::int64_t sum = step.exchange->all_gather_v(
        {.rows = rows.data, .count = rows.rows, .row_bytes = row, .gathered = made.data, .capacity = most},
        call_of(step));
    made.rows = sum < 0 ? most : sum;  // on device memory the host does not know the sum
  }

  void scatter(const CompiledStep& step) {
    const ProgramValue &rows = value(step.inputs[0]), &like = value(step.inputs[1]);
    const int number = step.outputs.front();
    const std::int64_t count = like.kind == ValueKind::count ? like.count : like.rows;
    require_dense(rows, row_bytes(rows, step.exchange->config()));
    if (like.device_count != nullptr)
      throw UsageError(
          "the count is in device memory, but the host must know how many rows this rank has: pass it as a "
          "number, or pass tokens");
    if (count < 0 || count > compiled(number).most_rows)
      throw UsageError(str("this rank's rows of the sum are ", count, "; 0 to ", compiled(number).most_rows,
                           " are possible"));
    prepare(number, count);
    ProgramValue& made = value(number);
    made.type = rows.type;
    // With a count in device memory the kernel accepts more rows than the sum, as a gather leaves there.
    if (step.device_count != nullptr)
      compiled_.device->set_number(step.device_count, static_cast<std::int32_t>(count), stream());
    phase_ = Phase::in_call;
    step.exchange->reduce_scatter_v({.rows = rows.data,
                                     .total = rows.rows,
                                     .type = rows.type,
                                     .sums = made.data,
                                     .count = count,
                                     .device_count = step.device_count},
                                    call_of(step));
  }

  // Points a value to its memory in the evaluator.
  void prepare(int number, std::int64_t rows) {
    const CompiledValue& made = compiled(number);
    ProgramValue& set = value(number);
    std::byte* memory = made.memory;
    if (made.join >= 0) {
      memory = compiled(made.join).memory;
      for (const int part : made.parts_before) memory += value(part).rows * made.row_bytes;
    }
    set = {.kind = made.kind, .data = memory, .rows = rows, .type = made.type};
    if (made.kind == ValueKind::count) {
      set.device_count = reinterpret_cast<std::int32_t*>(std::exchange(set.data, nullptr));
      set.rows = 0;
    }
  }

  void run_function(const CompiledStep& step) {
    std::int64_t tokens = 0;
    for (const int input : std::views::reverse(step.inputs))
      if (contains(kByToken, value(input).kind)) tokens = value(input).rows;
    for (const int output : step.outputs) {
      const bool by_token = contains(kByToken, compiled(output).kind);
      if (by_token && tokens > compiled(output).most_rows)
        throw UsageError(str("the function's input has ", tokens, " rows; at most ",
                             compiled(output).most_rows, " are possible: max_tokens of the exchange"));
      prepare(output, by_token ? tokens : compiled(output).most_rows);
    }
    const Operands& operands = operands_[step_];
    phase_ = Phase::in_function;
    (*step.function)(operands.inputs, operands.outputs, stream());
    phase_ = Phase::before_call;
    for (const int output : step.outputs) {
      if (value(output).kind != compiled(output).kind)
        throw UsageError(str("the function has made ", to_string(value(output).kind), " of a value of kind ",
                             to_string(compiled(output).kind), ": set its data and rows, not its kind"));
      const std::int64_t rows = value(output).rows, most = compiled(output).most_rows;
      if (rows < 0 || rows > most)
        throw UsageError(str("the function has set ", rows, " rows of ", to_string(value(output).kind),
                             "; 0 to ", most, " are possible"));
    }
  }

  void take_part(const CompiledStep& step) {
    const ProgramValue& whole = value(step.inputs.front());
    const Config& config = step.exchange->config();
    const std::int64_t first = step.index * whole.rows / step.of,
                       end = (step.index + 1) * whole.rows / step.of;
    const std::int64_t row = whole.stride != 0 ? whole.stride : row_bytes(whole, config);
    ProgramValue& part = value(step.outputs.front());
    part = whole;
    part.rows = end - first;
    if (whole.data != nullptr) part.data = static_cast<std::byte*>(whole.data) + first * row;
  }

  void join(const CompiledStep& step) {
    const int number = step.outputs.front();
    prepare(number, 0);
    ProgramValue& joined = value(number);
    const std::int64_t row = compiled(number).row_bytes;
    for (const int input : step.inputs) {
      const ProgramValue& part = value(input);
      if (part.type != joined.type)
        throw UsageError(str("the parts are of ", to_string(part.type), ", the exchange's combine_type is ",
                             to_string(joined.type)));
      if (joined.rows + part.rows > compiled(number).most_rows)
        throw UsageError(str("the parts have more than ", compiled(number).most_rows,
                             " rows: max_tokens of the exchange for each"));
      copy_rows(static_cast<std::byte*>(joined.data) + joined.rows * row, row, part);
      joined.rows += part.rows;
    }
  }

  void copy_rows(std::byte* to, std::int64_t row, const ProgramValue& rows) {
    const auto* const from = static_cast<const std::byte*>(rows.data);
    const std::int64_t stride = rows.stride != 0 ? rows.stride : row;
    if (from == to) return;
    if (compiled_.device != nullptr)
      return compiled_.device->copy_rows(to, from, stride, row, rows.rows, stream());
    for (std::int64_t i = 0; i < rows.rows; ++i)
      std::memcpy(to + i * row, from + i * stride, static_cast<std::size_t>(row));
  }

  // Takes part in the remaining calls without doing their work, so that each lane has had the same calls on
  // every rank: receives what has been sent, and refuses the rest with the reason that ended the run.
  void refuse_rest(const char* reason) noexcept {
    const std::size_t failed = step_;
    const UsageError error(where() + "failed on rank " + rank() + ": " + reason);
    for (step_ += phase_ == Phase::in_call; step_ < compiled_.steps.size(); ++step_) {
      const CompiledStep& step = compiled_.steps[step_];
      if (shape_of(step.kind).has_lane) step.exchange->refuse(operation_of(step.kind), error, call_of(step));
      if (!is_receive_phase(step.kind) || !sent_[static_cast<std::size_t>(step.sender)]) continue;
      try {
        if (step.kind == StepKind::dispatch_receive) step.exchange->dispatch_receive(call_of(step));
        if (step.kind == StepKind::combine_receive) step.exchange->combine_receive(call_of(step));
      } catch (const Error& other) {
        if (ends_group(other)) break;
      }
    }
    step_ = failed;
    streams_.join_all();
  }

  Stream stream() const { return streams_.of(step_); }

  std::string rank() const {
    for (const CompiledStep& step : compiled_.steps)
      if (step.exchange != nullptr) return std::to_string(step.exchange->rank().index());
    return "?";
  }

  Program program_;
  ProgramFunctions functions_;
  std::function<void(std::size_t, Stream)> observer_;
  CompiledProgram compiled_;
  RunStreams streams_;
  std::vector<ProgramValue> values_;
  std::vector<Operands> operands_;
  std::vector<const ProgramValue*> outputs_;
  // The state of the run.
  std::size_t step_ = 0;
  Phase phase_ = Phase::before_call;
  std::vector<bool> sent_;  // by step: whether it is a send phase that has begun a call
};

Evaluator::Evaluator(Program program, Exchange& exchange, ProgramFunctions functions)
    : Evaluator(std::move(program), ProgramExchanges{{"", &exchange}}, std::move(functions)) {}
Evaluator::Evaluator(Program program, const ProgramExchanges& exchanges, ProgramFunctions functions)
    : state_(std::make_unique<State>(std::move(program), exchanges, std::move(functions))) {}
Evaluator::~Evaluator() = default;
Evaluator::Evaluator(Evaluator&&) noexcept = default;
Evaluator& Evaluator::operator=(Evaluator&&) noexcept = default;

const Program& Evaluator::program() const {
  return state_->program();
}

std::span<const ProgramValue* const> Evaluator::run(std::span<const ProgramValue> inputs, Stream stream) {
  return state_->run(inputs, stream);
}

void Evaluator::set_observer(std::function<void(std::size_t, Stream)> observer) {
  state_->set_observer(std::move(observer));
}

}  // namespace ferry
