// Draws the sections of the page, in their order.

// ---- Header

function drawHeader() {
  document.title = `Ferry run: ${run.workload.trace}, ${R} ${R === 1 ? "rank" : "ranks"}`;
  byId("title").innerHTML = `${text("workload.trace")} over ${counted("configuration.ranks", "rank")}`;
  byId("subtitle").innerHTML =
    `${counted("workload.steps", "step")} of ${counted("workload.tokens_per_rank", "token")} per rank, ` +
    `top ${number("configuration.top_k")} of ${counted("configuration.experts", "expert")}, ` +
    `hidden ${number("configuration.hidden")}, ${text("configuration.backend")} backend` + crowdedCores();
  const { passed, total } = run.checks;
  const verdict = byId("verdict");
  verdict.classList.toggle("failed", passed < total);
  verdict.innerHTML = total === 0 ? `Nothing was checked: ${number("checks.passed")} of ${number("checks.total")}`
    : `${passed === total ? "✓" : "✕"} ${number("checks.passed")} of ${number("checks.total")} checks passed`;
}

// Where ranks of one host have to take turns, their times say little about a rank with a core of its own. mpirun gives each
// its cores.
function crowdedCores() {
  const { backend, group } = run.configuration;
  if (backend === "cuda" || group === "mpi" || !(R > run.machine.cores)) return "";
  return `. ${counted("configuration.ranks", "rank")} on ${counted("machine.cores", "core")}: times include waiting for a core`;
}

const figure = (name, value, note) =>
  `<div class="figure"><span class="name">${name}</span><b>${value}</b><small>${note}</small></div>`;

function flowFigure(direction, name) {
  const flow = run[direction];
  const note = flow.share_of_memcpy === null ? "memcpy was not measured"
    : `${number(`${direction}.share_of_memcpy`, "share")} of memcpy`;
  return figure(`${name} bandwidth`, number(`${direction}.bytes_per_second`, "rate"), note);
}

function drawHeadline() {
  const p50 = (what) => number(`latency.${what}.p50_us`, "time");
  const high = (what) => (run.latency[what].p99_us === null ? `largest ${number(`latency.${what}.max_us`, "time")}`
    : `${label("p99")} ${number(`latency.${what}.p99_us`, "time")}`);
  byId("headline").innerHTML =
    figure("Dispatch, median", p50("dispatch"), high("dispatch")) +
    figure("Combine, median", p50("combine"), high("combine")) +
    figure("Step, median", p50("step"), high("step")) +
    figure("Tokens per second", number("tokens_per_second"), "over all ranks") +
    flowFigure("dispatch", "Dispatch") +
    flowFigure("combine", "Combine") +
    figure("Dispatch wire bytes, all steps", number("dispatch.wire_bytes", "bytes"),
           `combine ${number("combine.wire_bytes", "bytes")}`) +
    figure("Busiest rank", number("load.busiest_rank.over_mean", "times"),
           `rank ${number("load.busiest_rank.index")}, relative to the mean`);
}

// ---- Latency: positions on a logarithmic scale

function drawLatency() {
  const rows = [...stages, "step"];
  const values = rows.flatMap((row) => [run.latency[row].p50_us, run.latency[row].max_us]);
  const low = Math.max(0.1, Math.min(...values) / 1.25);
  const high = Math.max(low * 10, largest(values) * 1.12);
  const place = (us) => percent(Math.log(Math.max(us, low) / low), Math.log(high / low));

  const marks = indices(14).map((i) => 10 ** (i - 2))
    .flatMap((decade) => (high / low > 300 ? [decade] : [decade, 2 * decade, 5 * decade]))
    .filter((us) => us >= low && us <= high);
  const grid = marks.map((us) => `<s style="left:${place(us)}"></s>`).join("");
  let apart = -1;  // where the last label stands that phones show, as a share of the scale
  const scale = marks.map((us) => {
    const at = Math.log(us / low) / Math.log(high / low);
    const rare = at < apart + 0.2;
    if (!rare) apart = at;
    return `<span data-label${rare ? ' class="rare"' : ""} style="left:${place(us)}">${tickTime(us)}</span>`;
  }).join("");
  const figures = ["p50", "p90", ...(run.latency.step.p99_us === null ? [] : ["p99"]), "max", "mean"];

  const line = (row) => {
    const path = (figureName) => `latency.${row}.${figureName}_us`;
    const mark = (figureName) => `<i class="${figureName}" data-path="${path(figureName)}" style="left:${place(at(path(figureName)))}"
      aria-label="${row} ${figureName}: ${shown(path(figureName), "time")}"></i>`;
    const { p50_us, max_us } = run.latency[row];
    return `<div class="row ${row}" role="row"><span class="name" role="rowheader"><span class="swatch"></span>${row}</span>
      <div class="range" data-low="${low}" data-high="${high}">${grid}
        <u style="left:${place(p50_us)};right:calc(100% - ${place(max_us)})"></u>
        ${figures.filter((f) => f !== "mean").reverse().map(mark).join("")}</div>` +
      figures.map((f) => `<span class="number" role="cell"><small data-label>${f}</small>${number(path(f), "time")}</span>`).join("") +
      "</div>";
  };
  byId("latency").style.setProperty("--figures", figures.length);
  byId("latency").innerHTML =
    `<div class="row head" role="row"><span></span><div class="range">${scale}</div>` +
    figures.map((f) => `<span class="number" data-label>${f}</span>`).join("") + "</div>" + rows.map(line).join("");
  const sample = (names, words) => `<span><span class="range">${names}</span>${words}</span>`;
  byId("marks").innerHTML = sample('<i class="p50"></i>', label("p50, the median")) +
    sample('<i class="p90"></i>', label(figures.includes("p99") ? "p90, p99" : "p90")) +
    sample('<u></u><i class="max"></i>', "end of the line: max");
  const share = (name) => `${name} ${number(`mean_step.${name}_us`, "time")}`;
  byId("step-shares").innerHTML =
    `A rank's mean step: ${[...stages, "waiting"].map(share).join(" + ")} = ${share("step")}.`;
}

// 200 µs, 1 ms: without trailing zeros.
function tickTime(us) {
  const [size, name] = unitOf(us, timeUnits);
  return `${+(us / size).toPrecision(12)} ${name}`;
}

// ---- Traffic: shades go from the smallest to the largest number outside the diagonal

const offDiagonal = (matrix) => matrix.flatMap((row, from) => row.filter((_, to) => to !== from));

// 0 for the smallest of the values, 1 for the largest.
const shadeIn = (values) => {
  const [least, most] = [smallest(values), largest(values)];
  return (bytes) => (most > least ? Math.min(Math.max((bytes - least) / (most - least), 0), 1) : 0);
};

// "rank 3", or "rank 3 (node 1)" where there are several nodes.
const rankWords = (rank) =>
  `rank ${rank}${run.configuration.nodes > 1 ? ` (node ${run.configuration.node_of_rank[rank]})` : ""}`;

// A matrix that is wider than the page scrolls, and says so.
const heatFrame = '<div class="heat-frame" tabindex="0" role="group" aria-label="Matrix, scrolls sideways if it is wide">';
const scrollHint = '<p class="hint">→ Scroll the matrix sideways for the other columns.</p>';
const showHints = () => document.querySelectorAll(".heat-frame")
  .forEach((frame) => frame.classList.toggle("cut", frame.scrollWidth > frame.clientWidth + 1));

function nodeMap(direction) {
  const { nodes } = run.configuration;
  if (nodes === 1) return "";
  const matrix = run[direction].node_traffic_bytes;
  const most = largest(offDiagonal(matrix));
  const [size, unit] = unitOf(Math.max(most, 1), byteUnits);
  const shade = shadeIn(offDiagonal(matrix));
  const cell = (from, to) => {
    const bytes = matrix[from][to];
    const share = shade(bytes);
    const classes = from === to ? "local" : "cell";
    const words = from === to ? `node ${from} keeps` : `node ${from} to node ${to}`;
    return `<span role="cell" class="${classes}" style="--v:${share.toFixed(4)}" data-unit="${unit}"
      data-path="${direction}.node_traffic_bytes.${from}.${to}" aria-label="${words}: ${as.bytes(bytes)}">` +
      `${unit === "B" ? fixed[0].format(bytes) : threeDigits(bytes / size)}</span>`;
  };
  const header = (node) => `<span class="name" role="columnheader" data-label>node ${node}</span>`;
  return `${heatFrame}<div class="heat" role="table" aria-label="Bytes from node to node, ${direction}"
      style="grid-template-columns:auto repeat(${nodes}, minmax(50px, 1fr));--cell:34px">
    <div role="row"><span class="name">from ↓ to →</span>${indices(nodes).map(header).join("")}</div>
    ${indices(nodes).map((from) => `<div role="row">${header(from)}${indices(nodes).map((to) => cell(from, to)).join("")}</div>`).join("")}
    </div></div>${scrollHint}
    <p class="notes"><span>In ${unit}, from node to node, over all steps.</span></p>`;
}

function heatMap(direction) {
  const flow = run[direction];
  const dense = R > 16;
  const between = offDiagonal(flow.traffic_bytes);
  const remote = largest(between);
  const cellShade = shadeIn(between);
  const sumShade = shadeIn([...flow.sent_bytes, ...flow.received_bytes]);
  const [size, unit] = unitOf(Math.max(remote, 1), byteUnits);
  const inUnit = (bytes) => (unit === "B" ? fixed[0].format(bytes) : threeDigits(bytes / size));

  const cell = (path, bytes, shadeOf, classes, words) => {
    const share = shadeOf(bytes);
    const shade = classes === "cell" || (dense && classes === "sum") ? ` style="--v:${share.toFixed(4)}"` : "";
    const all = classes + (dense && classes === "sum" ? " shaded" : "");
    return `<span role="cell" class="${all}"${shade} data-path="${direction}.${path}" data-unit="${unit}" ` +
      `aria-label="${words}: ${as.bytes(bytes)}">${dense ? "" : inUnit(bytes)}</span>`;
  };
  const header = (rank) => (dense && rank % 8 ? "<span></span>" : `<span class="name" role="columnheader" data-label>${rank}</span>`);
  const line = (from) => `<div role="row">${header(from)}` +
    flow.traffic_bytes[from].map((bytes, to) => cell(`traffic_bytes.${from}.${to}`, bytes, cellShade,
      from === to ? "local" : "cell", from === to ? `${rankWords(from)} keeps` : `${rankWords(from)} to ${rankWords(to)}`)).join("") +
    cell(`sent_bytes.${from}`, flow.sent_bytes[from], sumShade, "sum", `rank ${from} sends`) + "</div>";

  const columns = dense ? `auto repeat(${R + 1}, minmax(0, 1fr))` : `auto repeat(${R}, minmax(38px, 1fr)) minmax(50px, 1fr)`;
  return `${heatFrame}<div class="heat${dense ? " dense" : ""}" role="table" aria-label="Bytes from rank to rank, ${direction}"
      style="grid-template-columns:${columns};--cell:${dense ? Math.max(8, Math.floor(640 / R)) : 34}px">
    <div role="row"><span class="name">${dense ? "" : "from ↓ to →"}</span>${indices(R).map(header).join("")}<span class="name">${dense ? "" : "sends"}</span></div>
    ${indices(R).map(line).join("")}
    <div role="row"><span class="name">${dense ? "" : "receives"}</span>` +
    indices(R).map((to) => cell(`received_bytes.${to}`, flow.received_bytes[to], sumShade, "sum", `rank ${to} receives`)).join("") +
    `<span></span></div></div></div>${scrollHint}
    <div class="scale"><span data-label>${as.bytes(smallest(between))}</span><i></i><span data-label>${as.bytes(remote)}</span>
      <span><i class="local-mark"></i>stays on its rank: ${number(`${direction}.local_bytes`, "bytes")} in total</span></div>
    <p class="notes"><span>${dense ? "Over all steps. Rows send, columns receive; the last column and row are the totals that a rank sends and receives."
      : `In ${unit}, over all steps. Rows send, columns receive.`}</span>
      <span>${number(`${direction}.wire_bytes`, "bytes")} on the wire in ${counted(`${direction}.messages`, "message")}</span>
      <span>${number(`${direction}.between_nodes_bytes`, "bytes")} between nodes</span>
      <span>${number(`${direction}.moved_bytes`, "bytes")} moved</span></p>`;
}

function drawTraffic() {
  const directions = ["dispatch", "combine"];
  byId("traffic").innerHTML = directions.map((d) => `<div id="traffic-${d}">${heatMap(d)}${nodeMap(d)}</div>`).join("");
  press("direction", "dispatch", (chosen) => {
    directions.forEach((d) => (byId(`traffic-${d}`).hidden = d !== chosen));
    showHints();
  });
  addEventListener("resize", showHints);
}

// ---- Load: bars whose height is the count; the SVG is one unit wide per bar

// A load this close to the mean needs no attention.
const balancedBelow = 1.1;
const hot = (busiest) => (busiest.over_mean < balancedBelow ? "" : "hot");

function bars({ path, values, busiest, words, odd, names }) {
  const step = ticks(Math.max(1, largest(values)), 4)[0];
  const top = Math.ceil(Math.max(1, largest(values)) / step - 1e-9) * step;  // a tick above the highest bar
  const wide = values.length > 128 ? 1 : 0.8;
  const marks = ticks(top, Math.round(top / step));
  return `<div class="bars"><div class="values">${names[0]}</div><div class="ticks"><span data-label style="bottom:0">0</span>${marks.map((t) =>
      `<span data-label style="bottom:${percent(t, top)}">${as.count(t)}</span>`).join("")}</div>
    <svg viewBox="0 0 ${values.length} ${top}" preserveAspectRatio="none" role="group" data-order="number"
      aria-label="${words}">
      <g transform="matrix(1 0 0 -1 0 ${top})">
        ${marks.map((t) => `<path class="grid" d="M0 ${t}H${values.length}"/>`).join("")}
        ${values.map((value, i) => `<rect class="${i === busiest.index && hot(busiest) ? "busiest" : odd(i) ? "odd" : ""}" role="img"
          data-path="${path}.${i}" x="${i + (1 - wide) / 2}" width="${wide}" height="${value}"
          aria-label="${barWords(path, i, value)}"/>`).join("")}
        <path class="mean" d="M0 ${busiest.mean}H${values.length}"/>
      </g></svg>
    <div></div><div class="axis below"></div><div class="places">${names[1]}</div></div>`;
}

function barWords(path, i, value) {
  return path.endsWith("expert") ? `expert ${i} on rank ${run.load.rank_of_expert[i]}, routes: ${as.count(value)}`
    : `rank ${i}, rows: ${as.count(value)}`;
}

const meanNote = (path, what) => `<span><span class="dash"></span>mean ${number(path, "mean")} ${what}</span>`;

function drawExperts() {
  const { routes_per_expert, rank_of_expert, busiest_expert } = run.load;
  byId("experts").innerHTML = bars({
    path: "load.routes_per_expert", values: routes_per_expert, busiest: busiest_expert,
    words: "Routes to each expert", names: ["routes", "expert"], odd: (i) => rank_of_expert[i] % 2 === 1,
  }) + `<p class="notes"><span class="${hot(busiest_expert)}">busiest: expert ${number("load.busiest_expert.index")} on rank
      ${number(`load.rank_of_expert.${busiest_expert.index}`)}, ${number("load.busiest_expert.over_mean", "times")} the mean</span>
    ${meanNote("load.busiest_expert.mean", "routes")}
    <span>${number("load.idle_experts")} of ${counted("configuration.experts", "expert")} idle</span>
    <span>${counted("load.dropped_routes", "route")} dropped</span>
    <span>shades alternate from rank to rank</span></p>`;

  const svg = byId("experts").querySelector("svg");
  const axis = byId("experts").querySelector(".axis");
  const places = byId("experts").querySelector(".places");
  const rects = [...svg.querySelectorAll("rect")];
  const byLoad = indices(E).sort((a, b) => routes_per_expert[b] - routes_per_expert[a] || a - b);
  const wide = +rects[0].getAttribute("width");
  press("order", "number", (order) => {
    svg.dataset.order = order;
    const chosen = order === "load" ? byLoad : indices(E);
    chosen.forEach((expert, place) => rects[expert].setAttribute("x", place + (1 - wide) / 2));
    const marks = order === "load" ? [] : [0, ...ticks(E - 1, 8)];
    axis.innerHTML = marks.map((i) => tickBelow(i, E)).join("");
    places.textContent = order === "load" ? "experts, busiest first" : "expert";
  });
}

// The first tick and one close to the end would stick out of the picture if they were centred.
const tickBelow = (i, n) => {
  const [first, last] = [i === 0 && n > 16, i > 0.96 * n && n > 16];
  const place = first ? "left:0;transform:none" : last ? "right:0;transform:none" : `left:${percent(i + 0.5, n)}`;
  return `<span data-label style="${place}">${i}</span>`;
};

function drawRanks() {
  const { rows_per_rank, busiest_rank, shared_rows_per_rank } = run.load;
  const shared = shared_rows_per_rank === undefined ? ""
    : `<span>besides ${number("load.shared_rows_per_rank", "count")} rows of its own for the shared experts on each rank</span>`;
  byId("ranks").innerHTML = bars({
    path: "load.rows_per_rank", values: rows_per_rank, busiest: busiest_rank,
    words: "Rows received by each rank", names: ["rows", "rank"], odd: () => false,
  }) + `<p class="notes"><span class="${hot(busiest_rank)}">busiest: rank ${number("load.busiest_rank.index")},
      ${number("load.busiest_rank.over_mean", "times")} the mean</span>${meanNote("load.busiest_rank.mean", "rows")}${shared}</p>`;
  byId("ranks").querySelector(".axis").innerHTML =
    indices(R).filter((i) => R <= 16 || i % 8 === 0).map((i) => tickBelow(i, R)).join("");
}

// ---- Checks and facts

function drawChecks() {
  byId("checks").innerHTML = run.checks.list.map((check, i) => {
    const path = (field) => `checks.list.${i}.${field}`;
    const error = check.error === null ? "" : `, relative error ${number(path("error"), "error")}`;
    const allowed = check.tolerance === null ? "" : `, ${number(path("tolerance"), "error")} allowed`;
    return `<li class="${check.passed ? "" : "failed"}"><b>${number(path("passed"), "passed")}</b><div>${text(path("name"))}
      <small>${number(path("compared"))} compared, ${number(path("wrong"))} wrong${error}${allowed}</small>
      ${check.detail ? `<small>${text(path("detail"))}</small>` : ""}</div></li>`;
  }).join("");
}

function facts(title, entries) {
  const lines = entries.filter(([, path]) => at(path) !== null && at(path) !== "")
    .map(([name, path, kind = "text", after = ""]) => `<dt>${name}</dt><dd>${number(path, kind)}${after}</dd>`);
  return `<div><h2>${title}</h2><dl>${lines.join("")}</dl></div>`;
}

function drawFacts() {
  byId("facts").innerHTML =
    facts("Trace", [
      ["Name", "workload.trace"], ["Kind", "workload.synthesised", "kind"], ["Description", "workload.description"], ["Recipe", "workload.recipe"],
      ["Seed", "workload.seed"], ["Layers", "workload.layers", "count"], ["Tokens", "workload.tokens", "count", " in a layer"],
      ["Per rank and step", "workload.tokens_per_rank", "count", " tokens"], ["Steps", "workload.steps", "count"],
    ]) +
    facts("Exchange", [
      ["Backend", "configuration.backend"], ["Ranks", "configuration.ranks", "count"], ["Ranks run as", "configuration.group"],
      ["Nodes", "configuration.nodes", "count"], ["Nodes are", "configuration.simulated_nodes", "simulated"],
      ["Hops", "configuration.hops"],
      ...(run.configuration.input ? [["Input", "configuration.input"]] : []),
      ["Experts", "configuration.experts", "count"],
      ...(run.configuration.shared_experts > 0 ? [["Shared experts", "configuration.shared_experts", "count"]] : []),
      ["Top k", "configuration.top_k", "count"],
      ["Hidden", "configuration.hidden", "count"], ["Maximum tokens", "configuration.max_tokens", "count", " per rank"],
      ["Layout", "configuration.layout"], ["Format", "configuration.format"], ["Reduction", "configuration.reduction"],
      ["Reduction level", "configuration.reduction_level"],
      ["Combine type", "configuration.combine_type"], ["Expert function", "configuration.expert_function"],
    ]) +
    facts("Machine", [
      ["Processor", "machine.cpu"], ["Cores", "machine.cores", "count"], ["Memory", "machine.memory_bytes", "bytes"],
      ...(run.machine.memcpy_bytes_per_second > 0 ? [["Memcpy", "machine.memcpy_bytes_per_second", "rate", " read and written"],
        ["Memcpy threads", "machine.memcpy_threads", "count"]] : []),
      ["Started", "started_at"], ["Ferry", "ferry_version"], ["Command", "command"],
    ]);
}

// ---- Interaction

// A group of buttons [data-<name>], one of which is pressed.
function press(name, first, choose) {
  const buttons = [...document.querySelectorAll(`button[data-${name}]`)];
  const chosen = (value) => {
    buttons.forEach((b) => b.setAttribute("aria-pressed", b.dataset[name] === value));
    choose(value);
  };
  buttons.forEach((b) => b.addEventListener("click", () => chosen(b.dataset[name])));
  chosen(first);
}

function answerPointer() {
  const tip = byId("tip");
  const hide = () => (tip.hidden = true);
  addEventListener("pointermove", (event) => {
    const target = event.target.closest?.("main [data-path]");
    const words = target && (target.getAttribute("aria-label") || (target.closest(".lanes") && spanWords(target.dataset.path)));
    if (!words) return hide();
    tip.textContent = words;
    tip.hidden = false;
    const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    const above = event.clientY + 18 + tip.offsetHeight > innerHeight;
    tip.style.transform = `translate(${Math.max(8, left)}px, ${event.clientY + (above ? -10 - tip.offsetHeight : 18)}px)`;
  });
  addEventListener("scroll", hide, { passive: true });
  document.addEventListener("pointerleave", hide);
}

function answerTheme() {
  byId("theme").addEventListener("click", () => {
    const now = document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
  });
}

drawHeader();
drawHeadline();
drawComparison();
drawLatency();
drawTimeline();
drawTraffic();
drawExperts();
drawRanks();
drawChecks();
drawFacts();
answerPointer();
answerTheme();
