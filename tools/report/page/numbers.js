"use strict";
// Reads the run that the page holds and formats its numbers. Every number shown is in an element whose data-path is
// its path in the JSON, or is part of a label (data-label), such as a name or an axis tick.

const run = JSON.parse(document.getElementById("run").textContent);
const at = (path) => path.split(".").reduce((value, key) => value[key], run);
const byId = (id) => document.getElementById(id);
const escaped = (text) => String(text).replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);

// ---- Number formats

const fixed = [0, 1, 2].map((digits) =>
  new Intl.NumberFormat("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits }));
const threeDigits = (value) => fixed[value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2].format(value);
const timeUnits = [[1, "µs"], [1e3, "ms"], [1e6, "s"]];
const byteUnits = [[1, "B"], [1e3, "kB"], [1e6, "MB"], [1e9, "GB"], [1e12, "TB"]];
// The largest unit that the rounded value reaches.
const unitOf = (value, units) => units.reduce((chosen, unit) => (value >= 0.9995 * unit[0] ? unit : chosen));
const scaled = (value, units) => {
  const [size, name] = unitOf(value, units);
  return `${name === "B" ? fixed[0].format(value) : threeDigits(value / size)} ${name}`;
};

const as = {
  count: (value) => fixed[0].format(value),
  mean: (value) => threeDigits(value),
  time: (value) => scaled(value, timeUnits),
  bytes: (value) => scaled(value, byteUnits),
  rate: (value) => `${scaled(value, byteUnits)}/s`,
  share: (value) => `${fixed[1].format(value * 100)} %`,
  times: (value) => `${fixed[2].format(value)} ×`,
  error: (value) => value.toExponential(1),
  text: (value) => value,
  passed: (value) => (value ? "passed" : "failed"),
  kind: (value) => (value ? "synthesised" : "recorded"),
  simulated: (value) => (value ? "simulated" : "real"),
};

const shown = (path, kind) => {
  const value = at(path);
  return value === null ? "none" : as[kind](value);
};
const number = (path, kind = "count") => `<span data-path="${path}">${escaped(shown(path, kind))}</span>`;
// 1 rank, 2 ranks.
const counted = (path, one) => `${number(path)} ${one}${at(path) === 1 ? "" : "s"}`;
const text = (path) => number(path, "text");
const label = (words) => `<span data-label>${escaped(words)}</span>`;

const R = run.configuration.ranks;
const E = run.configuration.experts;
const stages = ["dispatch", "experts", "combine"];
const percent = (part, whole) => `${((100 * part) / whole).toFixed(3)}%`;
const indices = (n) => Array.from({ length: n }, (_, i) => i);
const largest = (values) => values.reduce((a, b) => Math.max(a, b), 0);
const smallest = (values) => (values.length === 0 ? 0 : values.reduce((a, b) => Math.min(a, b)));

// At most `most` round numbers in (0, limit].
function ticks(limit, most) {
  if (!(limit > 0)) return [];
  const rough = limit / most;
  const decade = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * decade).find((s) => s >= rough * 0.999999);
  return indices(Math.floor(limit / step + 1e-9)).map((i) => (i + 1) * step);
}
