// Binds programs as values. ferry/_evaluator.py runs them.
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "ferry/program.hpp"

namespace ferry::python {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using NameAndKind = std::pair<std::string, std::string>;

std::vector<NameAndKind> with_kinds(const std::vector<ProgramName>& names) {
  std::vector<NameAndKind> found;
  for (const ProgramName& one : names) found.emplace_back(one.name, to_string(one.kind));
  return found;
}

constexpr const char* kProgramDoc =
    R"(A layer, or several, as a value: steps over named values. Program(text) reads the text form and checks it.

str() gives the text back. Programs are equal if their texts are. ferry.Evaluator runs them; docs/programs.md
defines steps, values and text. Raises UsageError, which names the line or the step, the value and the remedy.)";

constexpr const char* kCheckDoc =
    R"(Says which steps exchanges of this configuration, or of these by name, cannot carry out. Local.

Raises UsageError for an exchange or lane that is not there and for options that a step cannot have, UnsupportedError for
a step that such an exchange does not have. Both name the step.)";

}  // namespace

void bind_program(nb::module_& module) {
  nb::class_<ProgramStep>(module, "ProgramStep", "A step of a Program.")
      .def_prop_ro(
          "kind", [](const ProgramStep& self) { return std::string(to_string(self.kind)); },
          "Such as 'dispatch' or 'call'.")
      .def_prop_ro(
          "name", [](const ProgramStep& self) { return self.name(); },
          "As errors name the step: 'rows (dispatch)'.")
      .def_ro("inputs", &ProgramStep::inputs, "Names of the values that it takes.")
      .def_prop_ro(
          "outputs", [](const ProgramStep& self) { return with_kinds(self.outputs); },
          "(name, kind) of each value that it makes.")
      .def_ro("function", &ProgramStep::function, "'call': name of the caller's function.")
      .def_ro("exchange", &ProgramStep::exchange, "Name of its exchange; '': the one without a name.")
      .def_ro("lane", &ProgramStep::lane)
      .def_ro("index", &ProgramStep::index, "'part': which part ...")
      .def_ro("of", &ProgramStep::of, "... of how many.")
      .def_ro("stream", &ProgramStep::stream, "On GPUs: number of its stream; 0: the caller's.")
      .def_ro("sm_limit", &ProgramStep::sm_limit,
              "dispatch, combine and their send phases on GPUs: the most thread blocks; 0: the lane's share.")
      .def_ro("after", &ProgramStep::after,
              "On GPUs: values of other streams that must be there before the step begins.");

  nb::class_<Program>(module, "Program", kProgramDoc)
      .def(
          "__init__", [](Program* self, const std::string& text) { new (self) Program(parse_program(text)); },
          "text"_a)
      .def_ro("name", &Program::name)
      .def_prop_ro(
          "inputs", [](const Program& self) { return with_kinds(self.inputs); },
          "(name, kind) of each input.")
      .def_ro("steps", &Program::steps, "In the order in which they run.")
      .def_ro("outputs", &Program::outputs, "Names of the values that a run returns.")
      .def(
          "check", [](const Program& self, const Config& config) { check(self, config); }, "config"_a,
          kCheckDoc)
      .def(
          "check",
          [](const Program& self, const std::map<std::string, Config>& configs) {
            check(self, ProgramConfigs(configs.begin(), configs.end()));
          },
          "configs"_a, kCheckDoc)
      .def(
          "overlap", [](const Program& self, int batches) { return overlap(self, batches); }, "batches"_a,
          R"(The program in micro-batches: tokens [i*N/n, (i+1)*N/n) of each rank, on lanes of their own.

The micro-batches take turns before each receive phase, so that messages of one are on their way while the functions of
another run. On GPUs their send phases, and their experts, come one after the other. The exchange needs `batches` times
as many lanes. Results have the bytes of the plain program if nothing is dropped and the functions treat each row alone.
Raises UsageError where inputs are not tokens, ids or weights, or outputs not tokens.)")
      .def(
          "svg", [](const Program& self) { return to_svg(self); },
          "A drawing: a box for each step, a column for each lane.")
      .def("__str__", [](const Program& self) { return to_string(self); })
      .def("__repr__",
           [](const Program& self) {
             return "<ferry.Program " + self.name + ", " + std::to_string(self.steps.size()) + " steps>";
           })
      .def(
          "__eq__",
          [](const Program& self, const nb::object& other) {
            const Program* const program =
                nb::isinstance<Program>(other) ? nb::inst_ptr<Program>(other) : nullptr;
            return program != nullptr && self == *program;
          },
          "other"_a.none())
      .def("__hash__", [](const Program& self) { return std::hash<std::string>{}(to_string(self)); });
}

}  // namespace ferry::python
