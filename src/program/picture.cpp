// to_svg(): a drawing of a program.
#include <algorithm>
#include <map>
#include <sstream>
#include <utility>
#include <vector>

#include "ferry/error.hpp"
#include "program/steps.hpp"

namespace ferry {

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
