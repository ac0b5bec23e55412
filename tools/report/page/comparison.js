// Draws the section that compares the run with an earlier one, if the run has `compared`.

const comparedFigures = [
  ...[...stages, "step"].flatMap((what) => [[`${what}, median`, `latency.${what}.p50_us`, "time"],
    [`${what}, mean`, `latency.${what}.mean_us`, "time"]]),
  ["tokens per second", "tokens_per_second", "count"],
  ...["dispatch", "combine"].flatMap((direction) => [[`${direction} bandwidth`, `${direction}.bytes_per_second`, "rate"],
    [`${direction} / memcpy`, `${direction}.share_of_memcpy`, "share"],
    [`${direction} wire bytes`, `${direction}.wire_bytes`, "bytes"]]),
  ["busiest rank / mean", "load.busiest_rank.over_mean", "times"],
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

function drawComparison() {
  if (!run.compared) return;
  byId("compared").hidden = false;
  byId("compared-note").innerHTML =
    `Earlier: ferry ${text("compared.ferry_version")}, ${text("compared.started_at")}: ${text("compared.command")}`;
  byId("compared-figures").innerHTML = tableHead(["Figure", "earlier", "this run", "this run / earlier"]) +
    comparedFigures.map(([name, path, kind]) => tableRow([name, noneOr(`compared.figures.${path}`, kind), noneOr(path, kind),
      noneOr(`compared.ratios.${path}`, "times")])).join("");
  const { differences } = run.compared;
  byId("compared-settings").innerHTML = differences.length === 0 ? "<caption>Settings and machine are the same.</caption>"
    : tableHead(["Setting that differs", "earlier", "this run"]) + differences.map(({ field, now, earlier }, i) => {
      const path = (name) => `compared.differences.${i}.${name}`;
      const kind = kindOfSetting(field, now ?? earlier);
      return tableRow([text(path("field")).replaceAll("_", "_<wbr>"), noneOr(path("earlier"), kind), noneOr(path("now"), kind)]);
    }).join("");
}
