#include "tools/report/program_page.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "tools/report/page.hpp"
#include "tools/report/units.hpp"

namespace ferry::report {
namespace {

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '<') {
      out += "&lt;";
    } else if (c == '>') {
      out += "&gt;";
    } else if (c == '&') {
      out += "&amp;";
    } else if (c == '"') {
      out += "&quot;";
    } else {
      out += c;
    }
  }
  return out;
}

const char* colour_of(StepKind kind) {
  switch (kind) {
    case StepKind::dispatch:
    case StepKind::dispatch_send:
    case StepKind::dispatch_receive:
    case StepKind::all_gather_v:
      return "var(--dispatch)";
    case StepKind::combine:
    case StepKind::combine_send:
    case StepKind::combine_receive:
    case StepKind::reduce_scatter_v:
      return "var(--combine)";
    default:
      return "var(--experts)";
  }
}

// A row for each rank and micro-batch; every step is a box whose tooltip names it.
class ProgramTimeline {
 public:
  ProgramTimeline(const ProgramReport& run, const ProgramRuns& runs, int rows_of_rank)
      : run_(run), runs_(runs), rows_of_rank_(rows_of_rank) {
    begin_ = std::ranges::min(runs.begin_us);
    length_ = std::max(std::ranges::max(runs.begin_us) - begin_, 1e-3);
  }

  std::string draw() const {
    const int rows = run_.configuration.ranks * rows_of_rank_;
    std::string out = fmt::format(
        "<svg viewBox=\"0 0 {} {}\" width=\"100%\" font-size=\"11\" fill=\"currentColor\" role=\"img\">\n",
        kLeft + kWidth, rows * kRow);
    for (int rank = 0; rank < run_.configuration.ranks; ++rank) {
      for (int row = 0; row < rows_of_rank_; ++row)
        out += fmt::format(
            "<text x=\"0\" y=\"{}\">{}</text>\n", y_of(rank, row) + kRow - 6,
            rows_of_rank_ == 1 ? fmt::format("rank {}", rank) : fmt::format("rank {}, batch {}", rank, row));
      for (std::size_t i = 0; i < runs_.program.steps.size(); ++i) out += box(rank, i);
    }
    return out + "</svg>\n";
  }

 private:
  static constexpr int kLeft = 110, kWidth = 900, kRow = 18;

  int y_of(int rank, int row) const { return (rank * rows_of_rank_ + row) * kRow; }
  double x_of(double us) const { return kLeft + (us - begin_) / length_ * kWidth; }

  std::string box(int rank, std::size_t number) const {
    const ProgramStep& step = runs_.program.steps[number];
    const Span span = runs_.span_of(rank, number);
    const int row = rows_of_rank_ == 1 ? 0 : run_.batch_of(step);
    return fmt::format(
        "<rect x=\"{:.2f}\" y=\"{}\" width=\"{:.2f}\" height=\"{}\" fill=\"{}\"><title>{}: "
        "{}</title></rect>\n",
        x_of(span.begin_us), y_of(rank, row) + 2, std::max(x_of(span.end_us) - x_of(span.begin_us), 0.4),
        kRow - 4, colour_of(step.kind), escaped(step.name()), in_time(span.length_us()));
  }

  const ProgramReport& run_;
  const ProgramRuns& runs_;
  int rows_of_rank_;
  double begin_ = 0, length_ = 1;
};

std::string row_of(const std::string& name, const std::string& value) {
  return fmt::format("<tr><td>{}</td><td>{}</td></tr>\n", escaped(name), escaped(value));
}

std::string times_row(const std::string& name, const ProgramRuns& runs) {
  std::vector<double> sorted = runs.times_us;
  std::ranges::sort(sorted);
  return row_of(name, fmt::format("median {}, {} to {}", in_time(sorted[sorted.size() / 2]),
                                  in_time(sorted.front()), in_time(sorted.back())));
}

std::string section(const std::string& title, const std::string& body) {
  return fmt::format("<h2>{}</h2>\n{}", escaped(title), body);
}

std::string program_section(const std::string& title, const ProgramReport& run, const ProgramRuns& runs,
                            int rows_of_rank) {
  return section(title,
                 ProgramTimeline(run, runs, rows_of_rank).draw() +
                     fmt::format("<details><summary>Text and drawing</summary><pre>{}</pre>{}</details>\n",
                                 escaped(to_string(runs.program)), to_svg(runs.program)));
}

std::string second_name(const ProgramReport& run) {
  return run.micro_batches > 1 ? fmt::format("{} micro-batches", run.micro_batches) : "a second time";
}

}  // namespace

std::string program_page(const ProgramReport& run, const std::string& json) {
  std::string checks, facts;
  for (const Check& check : run.checks)
    checks +=
        row_of(check.name, check.passed ? fmt::format("{} values, all equal", with_thousands(check.compared))
                                        : fmt::format("{} of {} wrong, {}", with_thousands(check.wrong),
                                                      with_thousands(check.compared), check.detail));
  facts += row_of("trace", run.workload.trace);
  facts += row_of("backend", fmt::format("{}, {} of {}", run.configuration.backend,
                                         counted(run.configuration.ranks, "rank"), run.configuration.group));
  facts += row_of("tokens per rank", with_thousands(run.workload.tokens_per_rank));
  facts += row_of("layer",
                  fmt::format("{} experts, top-{}, {} columns, {}", run.configuration.experts,
                              run.configuration.top_k, run.configuration.hidden, run.configuration.format));
  facts += row_of("experts", run.configuration.expert_function);
  facts += row_of("machine", fmt::format("{}, {} cores", run.machine.cpu, run.machine.cores));
  facts += row_of("command", run.command);
  const std::string name = escaped(run.plain.program.name);
  std::string page = fmt::format(
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>Program "
      "{}</title>\n<style>",
      name);
  page += kPageCss;
  page +=
      "h2 { margin: 28px 0 8px; } td { padding: 2px 16px 2px 0; vertical-align: top; } pre { overflow-x: "
      "auto; }\n";
  page += fmt::format("</style></head><body>\n<h1>Program {}</h1>\n<p class=\"muted\">{}</p>\n", name,
                      escaped(run.started_at));
  page += section("Checks", "<table>" + checks + "</table>\n");
  page += section("Times of the slowest rank", "<table>" + times_row("plain program", run.plain) +
                                                   times_row(second_name(run), run.batched) + "</table>\n");
  page += program_section("Plain program, last run", run, run.plain, 1);
  page += program_section(
      second_name(run) +
          (run.micro_batches > 1 ? ", last run: a row for each rank and micro-batch" : ", last run"),
      run, run.batched, run.micro_batches);
  page += section("Run", "<table>" + facts + "</table>\n");
  page += "<script type=\"application/json\" id=\"run\">" + json + "</script>\n</body></html>\n";
  return page;
}

}  // namespace ferry::report
