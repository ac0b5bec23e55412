// The text form of programs: a line for each input, step and output.
#include <charconv>
#include <limits>
#include <optional>
#include <set>

#include "base/text.hpp"
#include "ferry/error.hpp"
#include "program/steps.hpp"

namespace ferry {

namespace {

constexpr std::size_t kMostNames = 3 * kMostSteps;

std::string print_list(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

std::string print_step(const ProgramStep& step) {
  std::string line;
  for (const ProgramName& output : step.outputs) {
    line += (line.empty() ? "" : ", ") + output.name;
    if (step.kind == StepKind::call) line += str(": ", to_string(output.kind));
  }
  line += str(" = ", to_string(step.kind), step.kind == StepKind::call ? " " + step.function : "", "(",
              print_list(step.inputs), ")");
  if (!step.exchange.empty()) line += " exchange=" + step.exchange;
  if (step.lane != 0) line += str(" lane=", step.lane);
  if (step.kind == StepKind::part) line += str(" index=", step.index, " of=", step.of);
  if (step.stream != 0) line += str(" stream=", step.stream);
  if (step.sm_limit != 0) line += str(" sm_limit=", step.sm_limit);
  for (const std::string& value : step.after) line += " after=" + value;
  return line;
}

// Reads one line from left to right.
class LineReader {
 public:
  // `values`: counts the names of values in the program.
  LineReader(std::string_view line, int number, std::size_t& values)
      : rest_(line.substr(0, line.find('#'))), number_(number), values_(values) {
    skip_spaces();
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw UsageError(str("program text, line ", number_, ": ", what));
  }

  bool at_end() const { return rest_.empty(); }

  // The text up to the next space or sign; empty at a sign.
  std::string_view word() {
    const std::size_t length = std::min(rest_.find_first_of(" \t\r=(),:"), rest_.size());
    const std::string_view found = rest_.substr(0, length);
    skip(length);
    return found;
  }

  std::string name(const char* what) {
    const std::string found(word());
    if (found.empty()) fail(str("expected ", what, at_end() ? " at the end" : str(" before '", rest_, "'")));
    return found;
  }

  std::string value(const char* what) {
    if (++values_ > kMostNames) fail(str("a program names values at most ", kMostNames, " times"));
    return name(what);
  }

  bool take(char sign) {
    if (rest_.empty() || rest_.front() != sign) return false;
    skip(1);
    return true;
  }

  void require(char sign) {
    if (!take(sign))
      fail(str("expected '", sign, "'", at_end() ? " at the end" : str(" before '", rest_, "'")));
  }

  void require_end() const {
    if (!at_end()) fail(str("what is '", rest_, "'? The line should have ended before it"));
  }

  int number(const std::string& attribute) {
    const std::string_view digits = word();
    int found = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), found);
    if (error != std::errc{} || end != digits.data() + digits.size())
      fail(str(attribute, " is '", digits, "', expected a number up to ", std::numeric_limits<int>::max()));
    return found;
  }

  template <class Kind>
  Kind kind(int number_of_kinds, const char* what) {
    const std::string found = name(what);
    std::string known;
    for (int i = 0; i < number_of_kinds; ++i) {
      if (found == to_string(static_cast<Kind>(i))) return static_cast<Kind>(i);
      known += str(i == 0 ? "" : ", ", to_string(static_cast<Kind>(i)));
    }
    fail(str("there is no ", what, " '", found, "'; there are: ", known));
  }

 private:
  void skip(std::size_t length) {
    rest_.remove_prefix(length);
    skip_spaces();
  }
  void skip_spaces() { rest_.remove_prefix(std::min(rest_.find_first_not_of(" \t\r"), rest_.size())); }

  std::string_view rest_;
  int number_;
  std::size_t& values_;
};

// `read`: the attributes of the step so far. Only `after` may stand more than once.
void read_attribute(LineReader& line, ProgramStep& step, std::set<std::string>* read) {
  const std::string attribute = line.name("an attribute");
  if (!read->insert(attribute).second && attribute != "after")
    line.fail(str("the step has two attributes '", attribute, "'"));
  line.require('=');
  if (attribute == "exchange") {
    step.exchange = line.name("the name of an exchange");
  } else if (attribute == "lane") {
    step.lane = line.number(attribute);
  } else if (attribute == "index") {
    step.index = line.number(attribute);
  } else if (attribute == "of") {
    step.of = line.number(attribute);
  } else if (attribute == "stream") {
    step.stream = line.number(attribute);
  } else if (attribute == "sm_limit") {
    step.sm_limit = line.number(attribute);
  } else if (attribute == "after") {
    step.after.push_back(line.value("the name of a value"));
  } else {
    line.fail(str("there is no attribute '", attribute,
                  "'; there are: exchange, lane, index, of, stream, sm_limit, after"));
  }
}

// Reads the rest of the line after `first`, the name of its first value.
ProgramStep read_step(LineReader& line, std::string first) {
  ProgramStep step;
  std::optional<std::string> with_kind, without_kind;
  for (step.outputs.push_back({std::move(first)});; step.outputs.push_back({line.value("a name")})) {
    ProgramName& output = step.outputs.back();
    const bool has_kind = line.take(':');
    if (has_kind) output.kind = line.kind<ValueKind>(kValueKinds, "kind of value");
    (has_kind ? with_kind : without_kind) = output.name;
    if (!line.take(',')) break;
  }
  line.require('=');
  step.kind = line.kind<StepKind>(kStepKinds, "kind of step");
  if (step.kind == StepKind::call) {
    step.function = line.name("the name of a function");
    if (without_kind)
      line.fail(str("a call says the kinds of its values: ", *without_kind, ": outputs = call ..."));
  } else if (with_kind) {
    line.fail(str("the kind of ", *with_kind, " follows from the step: leave it out"));
  }
  line.require('(');
  while (!line.take(')')) {
    if (!step.inputs.empty()) line.require(',');
    step.inputs.push_back(line.value("a value or ')'"));
  }
  std::set<std::string> attributes;
  while (!line.at_end()) read_attribute(line, step, &attributes);
  return step;
}

void read_line(LineReader& line, Program& program) {
  const std::string first = line.name("a name");
  if (first == "program") {
    if (!program.name.empty()) line.fail("the program has a name already");
    program.name = line.name("the program's name");
  } else if (first == "input") {
    ProgramName& input = program.inputs.emplace_back(line.value("the input's name"));
    line.require(':');
    input.kind = line.kind<ValueKind>(kValueKinds, "kind of value");
  } else if (first == "output") {
    program.outputs.push_back(line.value("the output's name"));
  } else {
    if (program.steps.size() == kMostSteps) line.fail(str("a program has at most ", kMostSteps, " steps"));
    program.steps.push_back(read_step(line, first));
  }
  line.require_end();
}

}  // namespace

std::string to_string(const Program& program) {
  std::string text = str("program ", program.name, "\n");
  for (const ProgramName& input : program.inputs)
    text += str("input ", input.name, ": ", to_string(input.kind), "\n");
  for (const ProgramStep& step : program.steps) text += print_step(step) + "\n";
  for (const std::string& output : program.outputs) text += str("output ", output, "\n");
  return text;
}

Program parse_program(std::string_view text) {
  Program program;
  std::size_t names = 0;  // of values
  for (int number = 1; !text.empty(); ++number) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    LineReader line(text.substr(0, end), number, names);
    if (text.substr(0, end).find('\0') != std::string_view::npos) line.fail("has a byte 0: this is no text");
    if (!line.at_end()) read_line(line, program);
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  if (program.name.empty()) throw UsageError("program text: it needs a line 'program NAME'");
  fill_in_kinds(program);
  check(program);
  return program;
}

}  // namespace ferry
