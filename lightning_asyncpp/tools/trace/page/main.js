// Puts the page together: what is shown (the view), and what the pointer and the keyboard do with it.
const model = readModel(document.getElementById("data").textContent);
const canvas = document.getElementById("lanes"), overview = document.getElementById("overview");
const tip = document.getElementById("tip"), painter = new Painter(canvas, model);
const SHORTEST = 1e-3; // ms
const view = {start: 0, end: model.length};
let hover = null, due = false;

function redraw() {
  if (due) return;
  due = true;
  requestAnimationFrame(() => {
    due = false;
    painter.draw(view, hover);
    drawOverview(overview, model, view);
    const span = view.end - view.start;
    document.getElementById("range").textContent =
      `${formatTime(view.start, span)} – ${formatTime(view.end, span)} (${formatTime(span, span)})`;
  });
}

function show(start, end) {
  const span = Math.min(Math.max(end - start, SHORTEST), model.length);
  view.start = Math.min(Math.max(0, start), model.length - span);
  view.end = view.start + span;
  redraw();
}

function zoom(factor, at = (view.start + view.end) / 2) {
  const span = Math.min(Math.max((view.end - view.start) * factor, SHORTEST), model.length);
  const before = (at - view.start) / (view.end - view.start);
  show(at - before * span, at + (1 - before) * span);
}

const move = (share) => show(view.start + share * (view.end - view.start), view.end + share * (view.end - view.start));
const fit = () => show(0, model.length);
const timeAt = (x) => view.start + ((x - GUTTER) / (canvas.clientWidth - GUTTER)) * (view.end - view.start);

// The innermost span at a point of the canvas; a little slack finds what is narrower than a pixel.
function spanAt(x, y) {
  const number = painter.place.tops.findIndex((top) => y >= top && y < top + painter.place.height);
  if (number < 0 || x < GUTTER) return null;
  const lane = model.lanes[number], time = timeAt(x), slack = 1.5 / (painter.scale / painter.ratio);
  const inLane = (y - painter.place.tops[number]) / painter.place.height;
  let best = null, bestScore = Infinity;
  for (let i = firstVisible(lane, time - slack); i < lane.count && lane.start[i] <= time + slack; i++) {
    const row = KINDS[lane.kinds[i]].row;
    if (lane.end[i] < time - slack || painter.hidden.has(lane.kinds[i])) continue;
    if ((row === "strip" && inLane < 0.84) || (row === "top" && inLane > 0.18)) continue;
    const distance = Math.max(lane.start[i] - time, time - lane.end[i], 0);
    const score = (row === "work" ? 0 : -1e9) + distance * 1e6 + (lane.end[i] - lane.start[i]);
    if (score < bestScore) [best, bestScore] = [{lane: number, span: i}, score];
  }
  return best;
}

function showTip(event) {
  hover = spanAt(event.offsetX, event.offsetY);
  tip.hidden = hover === null;
  if (hover) {
    const about = describe(model, model.lanes[hover.lane], hover.span), list = element("dl");
    for (const [name, value] of about.rows) list.append(element("dt", {}, name), element("dd", {}, String(value)));
    const swatch = element("span", {class: "swatch", style: `background:var(--${about.key})`});
    tip.replaceChildren(element("b", {}, swatch, about.title), list);
    const {width, height} = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(event.clientX + 16, innerWidth - width - 8)) + "px";
    tip.style.top = (event.clientY + 18 + height > innerHeight ? event.clientY - height - 12 : event.clientY + 18) + "px";
  }
  redraw();
}

function hideTip() {
  hover = null;
  tip.hidden = true;
  redraw();
}

function followPointer() {
  let dragged = null;
  canvas.addEventListener("pointerdown", (event) => {
    dragged = {x: event.offsetX, start: view.start, end: view.end};
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!dragged) return showTip(event);
    canvas.classList.add("dragging");
    const shift = ((dragged.x - event.offsetX) / (canvas.clientWidth - GUTTER)) * (dragged.end - dragged.start);
    tip.hidden = true;
    return show(dragged.start + shift, dragged.end + shift);
  });
  for (const name of ["pointerup", "pointercancel"]) {
    canvas.addEventListener(name, () => { dragged = null; canvas.classList.remove("dragging"); });
  }
  canvas.addEventListener("pointerleave", hideTip);
  canvas.addEventListener("dblclick", (event) => {
    const found = spanAt(event.offsetX, event.offsetY);
    if (!found) return;
    const lane = model.lanes[found.lane], length = lane.end[found.span] - lane.start[found.span];
    show(lane.start[found.span] - 0.15 * length, lane.end[found.span] + 0.15 * length);
  });
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const pixels = event.deltaMode === 0 ? 1 : 16;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      move(((event.deltaX || event.deltaY) * pixels) / canvas.clientWidth);
    } else {
      zoom(Math.exp(event.deltaY * pixels * 0.0016), timeAt(Math.max(event.offsetX, GUTTER)));
    }
    showTip(event);
  }, {passive: false});
}

function followOverview() {
  let from = null;
  const time = (event) => ((event.offsetX - GUTTER) / (overview.clientWidth - GUTTER)) * model.length;
  overview.addEventListener("pointerdown", (event) => {
    from = time(event);
    overview.setPointerCapture(event.pointerId);
  });
  overview.addEventListener("pointermove", (event) => {
    if (from !== null && Math.abs(time(event) - from) > model.length / 300) show(Math.min(from, time(event)), Math.max(from, time(event)));
  });
  overview.addEventListener("pointerup", (event) => {
    const span = view.end - view.start, at = time(event);
    if (Math.abs(at - from) <= model.length / 300) show(at - span / 2, at + span / 2);
    from = null;
  });
}

function goTo(batch) {
  let from = Infinity, to = -Infinity;
  for (const lane of model.lanes) {
    for (let i = 0; i < lane.count; i++) {
      if (lane.kinds[i] > 1 || lane.batches[i] !== batch) continue;
      from = Math.min(from, lane.start[i]);
      to = Math.max(to, lane.end[i]);
    }
  }
  if (to > from) show(from - 0.05 * (to - from), to + 0.05 * (to - from));
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  redraw();
}

function connectControls() {
  const actions = {
    "zoom-in": () => zoom(0.6), "zoom-out": () => zoom(1 / 0.6), left: () => move(-0.25), right: () => move(0.25), fit,
    theme: () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"),
  };
  for (const [id, act] of Object.entries(actions)) document.getElementById(id).addEventListener("click", act);
  document.getElementById("go").addEventListener("change", (event) => goTo(event.target.valueAsNumber));
  document.getElementById("colours").addEventListener("change", (event) => {
    painter.byVersion = event.target.value === "version";
    document.getElementById("hues").hidden = !painter.byVersion;
    redraw();
  });
  const keys = {"+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), w: () => zoom(0.6), s: () => zoom(1 / 0.6),
    ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2), a: () => move(-0.2), d: () => move(0.2), 0: fit, Home: fit};
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || ["INPUT", "SELECT"].includes(event.target.tagName)) return;
    if (Object.hasOwn(keys, event.key)) {
      event.preventDefault();
      keys[event.key]();
    }
  });
}

function makeLegend() {
  KINDS.forEach((kind, code) => {
    if (!model.used[code]) return;
    const swatch = element("span", {class: "swatch", style: `background:var(--${kind.key})`});
    const key = element("button", {class: "key", "aria-pressed": "true"}, swatch, kind.name);
    key.addEventListener("click", () => {
      const shown = painter.hidden.delete(code);
      if (!shown) painter.hidden.add(code);
      key.setAttribute("aria-pressed", String(shown));
      redraw();
    });
    document.getElementById("legend").append(key);
  });
}

function resize() {
  painter.resize(canvas.clientWidth, Math.max(320, innerHeight - 330));
  redraw();
}

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
setTheme(prefersDark.matches ? "dark" : "light");
prefersDark.addEventListener("change", (event) => setTheme(event.matches ? "dark" : "light"));
fillReport(model);
makeLegend();
connectControls();
followPointer();
followOverview();
addEventListener("resize", resize);
resize();
window.asyncppTrace = {model, view, painter, spanAt, show, fit, timeAt, ready: true}; // for tests, and the curious
