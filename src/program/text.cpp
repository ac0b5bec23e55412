// The text form of programs: a line for each input, step and output.
#include <algorithm>
#include <charconv>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <utility>
#include <vector>

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

struct NumberAttribute {
  std::string_view name;
  int ProgramStep::* field;
};
constexpr NumberAttribute kNumbers[] = {{"lane", &ProgramStep::lane},
                                        {"index", &ProgramStep::index},
                                        {"of", &ProgramStep::of},
                                        {"stream", &ProgramStep::stream},
                                        {"sm_limit", &ProgramStep::sm_limit}};

// `read`: the attributes of the step so far. Only `after` may stand more than once.
void read_attribute(LineReader& line, ProgramStep& step, std::set<std::string>* read) {
  const std::string attribute = line.name("an attribute");
  if (!read->insert(attribute).second && attribute != "after")
    line.fail(str("the step has two attributes '", attribute, "'"));
  line.require('=');
  if (attribute == "exchange") {
    step.exchange = line.name("the name of an exchange");
  } else if (attribute == "after") {
    step.after.push_back(line.value("the name of a value"));
  } else if (const auto* found = std::ranges::find(kNumbers, attribute, &NumberAttribute::name);
             found != std::end(kNumbers)) {
    step.*found->field = line.number(attribute);
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

namespace {

constexpr int kBoxWidth = 230, kBoxHeight = 26, kColumn = 260, kRow = 44, kMargin = 20, kTop = 50;

struct ProgramBox {
  int x = 0, y = 0;  // middle of its upper edge
};

class ProgramDrawing {
 public:
  explicit ProgramDrawing(const Program& program) : program_(program) {
    number_columns();
    int y = kTop;
    for (const ProgramName& input : program.inputs) place(input.name, 0, std::exchange(y, y + kRow));
    for (std::size_t i = 0; i < program.steps.size(); ++i)
      for (const ProgramName& output : program.steps[i].outputs)
        place(output.name, column_of_step_[i], kTop + kRow * static_cast<int>(program.inputs.size() + i));
    height_ = kTop + kRow * static_cast<int>(program.inputs.size() + program.steps.size() + 1) + kMargin;
    width_ = 2 * kMargin + kColumn * static_cast<int>(titles_.size());
  }

  std::string draw() {
    out_ << "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" << width_ << "\" height=\"" << height_
         << "\" font-family=\"sans-serif\" font-size=\"12\">\n"
         << "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n";
    for (std::size_t i = 0; i < titles_.size(); ++i)
      text(middle_of(static_cast<int>(i)), kTop - 20, titles_[i]);
    for (std::size_t i = 0; i < program_.steps.size(); ++i)
      for (const std::string& input : program_.steps[i].inputs)
        line(input, boxes_.at(program_.steps[i].outputs.front().name));
    for (const ProgramStep& step : program_.steps)
      for (const std::string& earlier : step.after)
        line(earlier, boxes_.at(step.outputs.front().name), " stroke-dasharray=\"4 4\"");
    const ProgramBox result{middle_of(0), height_ - kMargin - kRow};
    for (const std::string& output : program_.outputs) line(output, result);
    for (const ProgramName& input : program_.inputs)
      box(boxes_.at(input.name), input.name + ": " + to_string(input.kind), "#eeeeee");
    for (const ProgramStep& step : program_.steps)
      box(boxes_.at(step.outputs.front().name), step.name(), colour_of(step.kind));
    if (!program_.outputs.empty()) box(result, "outputs", "#eeeeee");
    out_ << "</svg>\n";
    return out_.str();
  }

 private:
  // Column 0 holds the steps without a lane.
  void number_columns() {
    titles_.push_back(program_.name);
    std::map<std::pair<std::string, int>, int> columns;
    std::map<std::string, int> of_value;
    for (const ProgramStep& step : program_.steps) {
      int column = 0;
      if (shape_of(step.kind).has_lane) {
        const auto [found, added] =
            columns.try_emplace({step.exchange, step.lane}, static_cast<int>(titles_.size()));
        if (added)
          titles_.push_back(step.exchange + (step.exchange.empty() ? "lane " : ", lane ") +
                            std::to_string(step.lane));
        column = found->second;
      } else if (is_receive_phase(step.kind) || step.kind == StepKind::wait) {
        column = of_value.at(step.inputs.front());
      }
      of_value[step.outputs.front().name] = column;
      column_of_step_.push_back(column);
    }
  }

  static int middle_of(int column) { return kMargin + column * kColumn + kColumn / 2; }
  void place(const std::string& name, int column, int y) { boxes_[name] = {middle_of(column), y}; }

  static const char* colour_of(StepKind kind) {
    if (is_dispatch(kind) || kind == StepKind::dispatch_receive) return "#cfe3f7";
    if (is_combine(kind) || kind == StepKind::combine_receive) return "#d5efd2";
    return kind == StepKind::call ? "#fbe3c0" : "#f4f4f4";
  }

  void text(int x, int y, const std::string& what) {
    out_ << "<text x=\"" << x << "\" y=\"" << y << "\" text-anchor=\"middle\">" << what << "</text>\n";
  }
  void box(const ProgramBox& at, const std::string& what, const char* colour) {
    out_ << "<rect x=\"" << at.x - kBoxWidth / 2 << "\" y=\"" << at.y << "\" width=\"" << kBoxWidth
         << "\" height=\"" << kBoxHeight << "\" rx=\"4\" fill=\"" << colour << "\" stroke=\"#555\"/>\n";
    text(at.x, at.y + 17, what);
  }
  void line(const std::string& from, const ProgramBox& to, const char* style = "") {
    const ProgramBox& start = boxes_.at(from);
    const int y = start.y + kBoxHeight, bend = std::max(20, (to.y - y) / 2);
    out_ << "<path d=\"M" << start.x << "," << y << " C" << start.x << "," << y + bend << " " << to.x << ","
         << to.y - bend << " " << to.x << "," << to.y << "\" fill=\"none\" stroke=\"#888\"" << style
         << "/>\n";
  }

  const Program& program_;
  std::vector<std::string> titles_;
  std::vector<int> column_of_step_;
  std::map<std::string, ProgramBox> boxes_;
  int width_ = 0, height_ = 0;
  std::ostringstream out_;
};

}  // namespace

std::string to_svg(const Program& program) {
  check(program);
  return ProgramDrawing(program).draw();
}

}  // namespace ferry
