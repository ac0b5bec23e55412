// Draws the section that compares the run with an earlier one, if the run has `compared`.

// Each figure: its name, path and kind, and which direction is better.
const comparedFigures = [
  ...[...stages, "step"].flatMap((what) => [[`${what}, median`, `latency.${what}.p50_us`, "time", "lower"],
    [`${what}, mean`, `latency.${what}.mean_us`, "time", "lower"]]),
  ["tokens per second", "tokens_per_second", "count", "higher"],
  ...["dispatch", "combine"].flatMap((direction) => [
    [`${direction} bandwidth`, `${direction}.bytes_per_second`, "rate", "higher"],
    [`${direction} / memcpy`, `${direction}.share_of_memcpy`, "share", "higher"],
    [`${direction} wire bytes`, `${direction}.wire_bytes`, "bytes", "lower"]]),
  ["busiest rank / mean", "load.busiest_rank.over_mean", "times", "lower"],
];

// How a setting is shown elsewhere on the page.
function kindOfSetting(field, value) {
  if (field === "workload.synthesised") return "kind";
  if (field === "configuration.simulated_nodes") return "simulated";
  if (field.endsWith("_bytes")) return "bytes";
  return typeof value === "number" ? "count" : "text";
}

const noneOr = (path, kind) => (at(path) === null ? label("none") : number(path, kind));
const tableRow = (cells) =>
  `<tr><th scope="row">${cells[0]}</th>${cells.slice(1).map((cell) => `<td>${cell}</td>`).join("")}</tr>`;
const tableHead = (names) => `<thead><tr>${names.map((name) => `<th scope="col">${name}</th>`).join("")}</tr></thead>`;

// By how much the times of one run's steps differ, as a share: a change below it is called noise.
const spreadOf = (what) => {
  const { p50_us, p90_us } = run.latency[what];
  return Math.max(0.02, p50_us > 0 ? p90_us / p50_us - 1 : 0);
};

function verdict(path) {
  const word = at(`compared.verdicts.${path}`);
  if (word === null) return "";
  const mark = { better: "✓ ", worse: "✕ " }[word] ?? "";
  return `<span class="${mark ? word : "same"}">${mark}${text(`compared.verdicts.${path}`)}</span>`;
}

function drawComparison() {
  if (!run.compared) return;
  byId("compared").hidden = false;
  const { differences } = run.compared;
  const same = differences.length === 0;
  byId("compared-note").innerHTML =
    `Earlier: ferry ${text("compared.ferry_version")}, ${text("compared.started_at")}: ${text("compared.command")}` +
    (same ? ". Settings and machine are the same." : "");
  const spreads = [...stages, "step"].map((what) => label(`${what} ${as.share(spreadOf(what))}`)).join(", ");
  byId("compared-noise").innerHTML = "Ratio: this run / earlier. ↓ lower is better, ↑ higher is better. " +
    (run.compared.same_work
      ? `Noise: a change of a time no larger than the spread of this run’s steps, from the median to ${label("p90")}: ${spreads}.`
      : "The runs do different work, so no change is called better or worse.");
  byId("compared-figures").innerHTML = tableHead(["Figure", "earlier", "this run", "ratio", ""]) +
    comparedFigures.map(([name, path, kind, better]) => tableRow([
      `${name} <small aria-label="${better} is better">${better === "lower" ? "↓" : "↑"}</small>`,
      noneOr(`compared.figures.${path}`, kind), noneOr(path, kind), noneOr(`compared.ratios.${path}`, "times"),
      verdict(path)])).join("");
  byId("compared-settings").hidden = same;
  byId("compared-settings").innerHTML =
    tableHead(["Setting that differs", "earlier", "this run"]) + differences.map(({ field, now, earlier }, i) => {
      const path = (name) => `compared.differences.${i}.${name}`;
      const kind = kindOfSetting(field, now ?? earlier);
      return tableRow([text(path("field")).replaceAll("_", "_<wbr>"), noneOr(path("earlier"), kind), noneOr(path("now"), kind)]);
    }).join("");
}
