// Draws the section that compares the run with an earlier one, if the run has `compared`.

// Each figure: its name, path and kind, which direction is better, and the stage whose times it comes from (null: it does not
// depend on times).
const comparedFigures = [
  ...[...stages, "step"].flatMap((what) => [[`${what}, median`, `latency.${what}.p50_us`, "time", "lower", what],
    [`${what}, mean`, `latency.${what}.mean_us`, "time", "lower", what]]),
  ["tokens per second", "tokens_per_second", "count", "higher", "step"],
  ...["dispatch", "combine"].flatMap((direction) => [
    [`${direction} bandwidth`, `${direction}.bytes_per_second`, "rate", "higher", direction],
    [`${direction} / memcpy`, `${direction}.share_of_memcpy`, "share", "higher", direction],
    [`${direction} wire bytes`, `${direction}.wire_bytes`, "bytes", "lower", null]]),
  ["busiest rank / mean", "load.busiest_rank.over_mean", "times", "lower", null],
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

// By how much the times of one run's steps differ, as a share: a change below it says nothing.
const leastNoise = 0.02;
const spreadOf = (what) => {
  const { p50_us, p90_us } = run.latency[what];
  return Math.max(leastNoise, p50_us > 0 ? p90_us / p50_us - 1 : 0);
};

// Whether a difference makes the runs do other work, so that neither is better: anything but the seed, the machine and how the work is done.
const withoutSeed = (recipe) => String(recipe).replace(/seed=\d+/, "");
const isOtherWork = ({ field, now, earlier }) => (field === "workload.recipe" ? withoutSeed(now) !== withoutSeed(earlier)
  : /^workload\.(?!seed$)|^configuration\.(ranks|experts|shared_experts|top_k|hidden)$/.test(field));

function verdict(path, better, what) {
  const ratio = at(`compared.ratios.${path}`);
  if (ratio === null || run.compared.differences.some(isOtherWork)) return "";
  const change = Math.max(ratio, 1 / ratio) - 1;
  if (ratio > 0 && change <= (what === null ? 0.005 : spreadOf(what)))
    return `<span class="same">${what === null ? "equal" : "noise"}</span>`;
  return (ratio > 1) === (better === "higher") ? '<span class="better">✓ better</span>' : '<span class="worse">✕ worse</span>';
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
    (differences.some(isOtherWork) ? "The runs do different work, so no change is called better or worse."
      : `Noise: a change of a time no larger than the spread of this run’s steps, from the median to ${label("p90")}: ${spreads}.`);
  byId("compared-figures").innerHTML = tableHead(["Figure", "earlier", "this run", "ratio", ""]) +
    comparedFigures.map(([name, path, kind, better, what]) => tableRow([
      `${name} <small aria-label="${better} is better">${better === "lower" ? "↓" : "↑"}</small>`,
      noneOr(`compared.figures.${path}`, kind), noneOr(path, kind), noneOr(`compared.ratios.${path}`, "times"),
      verdict(path, better, what)])).join("");
  byId("compared-settings").hidden = same;
  byId("compared-settings").innerHTML =
    tableHead(["Setting that differs", "earlier", "this run"]) + differences.map(({ field, now, earlier }, i) => {
      const path = (name) => `compared.differences.${i}.${name}`;
      const kind = kindOfSetting(field, now ?? earlier);
      return tableRow([text(path("field")).replaceAll("_", "_<wbr>"), noneOr(path("earlier"), kind), noneOr(path("now"), kind)]);
    }).join("");
}
