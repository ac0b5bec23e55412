// Draws the timeline. Rectangles are placed in microseconds; the SVG's view box selects the part shown.

function drawTimeline() {
  const steps = run.timeline.spans_us;
  const laneHeight = R <= 16 ? 20 : 10;
  const begins = steps.map((step) => step.reduce((first, rank) => Math.min(first, rank[0][0]), Infinity));
  const ends = steps.map((step) => step.reduce((last, rank) => Math.max(last, rank[2][1]), -Infinity));
  const first = begins[0];
  const last = Math.max(largest(ends), first + 1e-3);
  const fewSteps = Math.min(steps.length, Math.max(1, Math.min(6, Math.floor(600 / R))));
  const view = { from: first, to: Math.max(ends[fewSteps - 1], first + 1e-3) };

  const name = (rank) => (laneHeight >= 20 || rank % 8 === 0 ? label(R <= 16 ? `rank ${rank}` : rank) : "<span></span>");
  const bars = steps.map((step, s) => step.map((spans, r) => spans.map(([begin, end], p) =>
    `<rect class="${stages[p]}" data-path="timeline.spans_us.${s}.${r}.${p}" x="${begin}" width="${end - begin}" ` +
    `y="${r * laneHeight + 1}" height="${laneHeight - 2}"/>`).join("")).join("")).join("");
  const edges = begins.map((us) => `<path d="M${us} 0V${R * laneHeight}"/>`).join("");

  byId("timeline").innerHTML = `<div class="lanes-frame">
    <div></div><div class="axis above"></div>
    <div class="lane-names" style="display:grid;grid-auto-rows:${laneHeight}px">${indices(R).map(name).join("")}</div>
    <svg class="lanes" tabindex="0" role="img" preserveAspectRatio="none" style="height:${R * laneHeight + 2}px"
      aria-label="Stages of every rank over time; arrow keys move, plus and minus zoom">${edges}${bars}</svg>
    <div class="axis below"></div></div>`;
  const held = run.timeline.steps === run.workload.steps ? ""
    : ` The first ${number("timeline.steps")} of ${counted("workload.steps", "step")} are here; all other figures come from all steps.`;
  const caption = (shown) => {
    const words = shown.length === 0 ? "Between steps" : shown.length === 1 ? `Step ${shown[0]}`
      : `Steps ${shown[0]} to ${shown[shown.length - 1]}`;
    const all = shown.length === steps.length ? "" : ". “All” shows the others";
    byId("timeline-note").innerHTML =
      `${label(words)} of ${number("timeline.steps")}, counted from ${label("0")}${all}. Drag to move.${held}`;
  };
  byId("stages").innerHTML = stages.map((p) => `<li class="${p}"><span class="swatch"></span>${p}</li>`).join("");

  const svg = document.querySelector(".lanes");
  const show = () => {
    const width = view.to - view.from;
    const inside = (us) => us >= view.from && us <= view.to;
    svg.setAttribute("viewBox", `${view.from} -1 ${width} ${R * laneHeight + 2}`);
    const pixels = svg.clientWidth || 600;
    const narrow = pixels < 500;
    caption(indices(steps.length).filter((step) => begins[step] < view.to && ends[step] > view.from));
    let free = -Infinity;
    document.querySelector(".axis.above").innerHTML = begins.map((us, step) => {
      const x = ((us - view.from) / width) * pixels;
      const word = narrow && free > 0 ? "" : "step ";  // where there is little room only the first label says what it is
      const room = word ? 50 : 24;
      if (!inside(us) || x < free || x > pixels - room) return "";
      free = x + room + 8;
      return `<span data-label style="left:${percent(us - view.from, width)}">${word}${step}</span>`;
    }).join("");
    const gap = ticks(width, Math.max(3, Math.min(7, Math.floor(pixels / 70))))[0];
    const firstTick = Math.ceil(view.from / gap);
    document.querySelector(".axis.below").innerHTML = indices(Math.floor(view.to / gap) - firstTick + 1)
      .map((i) => (firstTick + i) * gap)
      .filter((us) => us > view.from + width * (24 / pixels) && us < view.to - width * (24 / pixels))
      .map((us) => `<span data-label style="left:${percent(us - view.from, width)}">${tickTime(us)}</span>`).join("");
  };

  const moveTo = (from, width) => {
    const fitting = Math.min(Math.max(width, 1e-1), last - first);
    view.from = Math.min(Math.max(from, first), last - fitting);
    view.to = view.from + fitting;
    show();
  };
  const moves = {
    earlier: () => moveTo(view.from - (view.to - view.from) / 2, view.to - view.from),
    later: () => moveTo(view.from + (view.to - view.from) / 2, view.to - view.from),
    in: () => zoom(0.5, 0.5),
    out: () => zoom(2, 0.5),
    all: () => moveTo(first, last - first),
  };
  const zoom = (factor, around) => {
    const width = view.to - view.from;
    moveTo(view.from + around * width * (1 - factor), width * factor);
  };
  document.querySelectorAll("[data-move]").forEach((button) =>
    button.addEventListener("click", moves[button.dataset.move]));
  const keys = { ArrowLeft: "earlier", ArrowRight: "later", "+": "in", "-": "out" };
  svg.addEventListener("keydown", (event) => {
    if (!keys[event.key]) return;
    event.preventDefault();
    moves[keys[event.key]]();
  });
  svg.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;  // the wheel alone scrolls the page
    event.preventDefault();
    zoom(event.deltaY < 0 ? 0.8 : 1.25, event.offsetX / svg.clientWidth);
  }, { passive: false });
  svg.addEventListener("pointerdown", (event) => {
    const start = { x: event.clientX, from: view.from, width: view.to - view.from };
    const drag = (move) => moveTo(start.from - ((move.clientX - start.x) / svg.clientWidth) * start.width, start.width);
    const stop = () => svg.removeEventListener("pointermove", drag);
    svg.setPointerCapture(event.pointerId);
    svg.addEventListener("pointermove", drag);
    svg.addEventListener("pointerup", stop, { once: true });
    svg.addEventListener("pointercancel", stop, { once: true });
  });
  addEventListener("resize", show);
  show();
}

function spanWords(path) {
  const [, , step, rank, stage] = path.split(".");
  const [begin, end] = at(path);
  return `rank ${rank}, step ${step}, ${stages[stage]}: ${as.time(end - begin)}, from ${as.time(begin)}`;
}
