// Draws lanes into a canvas, in device pixels. Spans narrower than a pixel become columns of their shares.
const GUTTER = 128, AXIS = 26, GAP = 3, GROUP = 14;
const PLAIN = new Set(["activation", "gradient", "agreement", "data", "evaluate", "checkpoint"]);
const VERSION_HUES = [211, 28, 140, 286, 350, 178, 52, 245];

function readPalette() {
  const style = getComputedStyle(document.documentElement), colours = {};
  for (const name of ["page", "panel", "ink", "dim", "line", "lane", "accent", ...KINDS.map((kind) => kind.key)]) {
    colours[name] = style.getPropertyValue("--" + name).trim();
  }
  colours.dark = document.documentElement.dataset.theme === "dark";
  colours.packed = KINDS.map((kind) => packed(colours[kind.key]));
  colours.packedLane = packed(colours.lane);
  return colours;
}

// A colour as a little-endian pixel of ImageData.
function packed(hex) {
  const value = parseInt(hex.slice(1), 16);
  return (0xff000000 | ((value & 0xff) << 16) | (value & 0xff00) | (value >> 16)) >>> 0;
}

function versionColour(version, forward, dark) {
  if (version < 0) return null;
  const hue = VERSION_HUES[version % VERSION_HUES.length];
  return `hsl(${hue} ${dark ? 48 : 62}% ${forward ? (dark ? 60 : 76) : dark ? 42 : 52}%)`;
}

// Where lanes stand: replicas are groups with a gap between them.
function layout(model, width, available) {
  const groups = new Set(model.lanes.map((lane) => lane.replica)).size;
  const room = (available - AXIS - groups * GROUP) / model.lanes.length - GAP;
  const height = Math.max(12, Math.min(42, Math.floor(room)));
  let y = AXIS, before = null;
  const tops = model.lanes.map((lane) => {
    if (before !== null && before !== lane.replica) y += GROUP;
    before = lane.replica;
    const top = y;
    y += height + GAP;
    return top;
  });
  return {width, height, tops, total: y + 6};
}

class Painter {
  constructor(canvas, model) {
    this.canvas = canvas;
    this.model = model;
    this.hidden = new Set();
    this.byVersion = false;
    this.painted = 0;
  }

  resize(width, available) {
    this.ratio = window.devicePixelRatio || 1;
    this.place = layout(this.model, width, available);
    this.canvas.style.height = this.place.total + "px";
    this.canvas.width = Math.round(width * this.ratio);
    this.canvas.height = Math.round(this.place.total * this.ratio);
  }

  draw(view, hover) {
    const context = this.canvas.getContext("2d"), {ratio, place} = this;
    this.colours = readPalette();
    this.painted = 0;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.fillStyle = this.colours.page;
    context.fillRect(0, 0, this.canvas.width, this.canvas.height);
    this.left = Math.round(GUTTER * ratio);
    this.right = this.canvas.width;
    this.scale = (this.right - this.left) / (view.end - view.start);
    this.drawGrid(context, view);
    this.model.lanes.forEach((lane, number) => this.drawLane(context, view, lane, place.tops[number] * ratio));
    this.drawNames(context);
    if (hover) this.drawHover(context, view, hover);
  }

  x(view, time) {
    return this.left + (time - view.start) * this.scale;
  }

  drawGrid(context, view) {
    const {ratio, colours} = this, span = view.end - view.start, step = tickStep(span, (this.right - this.left) / ratio / 110);
    context.font = `${11 * ratio}px system-ui, "DejaVu Sans", sans-serif`;
    context.textBaseline = "middle";
    context.textAlign = "center";
    for (let tick = Math.ceil(view.start / step) * step; tick <= view.end; tick += step) {
      const x = Math.round(this.x(view, tick));
      context.fillStyle = colours.line;
      context.fillRect(x, 18 * ratio, Math.max(1, Math.floor(ratio)), this.canvas.height);
      context.fillStyle = colours.dim;
      if (x > this.left + 24 * ratio && x < this.right - 28 * ratio) context.fillText(formatTick(tick, step), x, 10 * ratio);
    }
  }

  drawLane(context, view, lane, top) {
    const {ratio, colours, left, right} = this, height = Math.round(this.place.height * ratio), width = right - left;
    top = Math.round(top);
    context.fillStyle = colours.lane;
    context.fillRect(left, top, width, height);
    const columns = new Float32Array(width * KINDS.length), wide = [];
    let narrow = false;
    for (let i = firstVisible(lane, view.start); i < lane.count && lane.start[i] <= view.end; i++) {
      if (lane.end[i] < view.start || this.hidden.has(lane.kinds[i])) continue;
      this.painted++;
      const from = (lane.start[i] - view.start) * this.scale, to = (lane.end[i] - view.start) * this.scale;
      if (to - from >= 1 || KINDS[lane.kinds[i]].row !== "work" || (lane.kinds[i] === 2 && this.scale > 2)) wide.push(i);
      else narrow = addColumn(columns, lane.kinds[i], from, to, width) || narrow;
    }
    if (narrow) this.drawColumns(context, smoothed(columns, width, Math.round(3 * ratio)), top, height, width);
    let lastMark = -Infinity; // messages that hardly take time are marks, which must not run together
    for (const i of wide) {
      const from = (lane.start[i] - view.start) * this.scale, mark = KINDS[lane.kinds[i]].row === "top";
      if (mark && (lane.end[i] - lane.start[i]) * this.scale < 1) {
        if (from < lastMark + 5 * ratio) continue;
        lastMark = from;
      }
      this.drawSpan(context, view, lane, i, top, height);
    }
  }

  drawColumns(context, columns, top, height, width) {
    const image = context.getImageData(this.left, top, width, height), pixels = new Uint32Array(image.data.buffer);
    for (let x = 0; x < width; x++) {
      let y = height, sum = 0;
      for (let kind = 0; kind < KINDS.length; kind++) {
        sum += columns[x * KINDS.length + kind];
        const until = height - Math.min(height, Math.round(sum * height));
        while (y > until) pixels[--y * width + x] = this.colours.packed[kind];
      }
    }
    context.putImageData(image, this.left, top);
  }

  drawSpan(context, view, lane, i, top, height) {
    const {ratio} = this, code = lane.kinds[i], kind = KINDS[code];
    const from = Math.max(this.left, this.x(view, lane.start[i])), to = Math.min(this.right, this.x(view, lane.end[i]));
    const gap = code < 2 && to - from > 4 * ratio ? Math.min(1.2, ratio) : 0, width = Math.max(to - from - gap, 1);
    let y = top, tall = height;
    if (kind.row === "top") tall = Math.max(3, height * 0.18);
    if (kind.row === "strip") { tall = Math.max(3, height * 0.16); y = top + height - tall; }
    context.fillStyle = this.byVersion ? this.versionStyle(lane, i) : this.colours[kind.key];
    if (from <= this.right && to >= this.left) context.fillRect(from, y, width, tall);
    const text = String(code === 2 ? "U" + lane.indices[i] : lane.indices[i]);
    if (code <= 2 && this.place.height >= 12 && width > (6.4 * text.length + 5) * ratio) {
      context.fillStyle = code === 2 ? "#ffffff" : "#16202b";
      context.font = `${Math.min(11, this.place.height - 2) * ratio}px system-ui, "DejaVu Sans", sans-serif`;
      context.textAlign = "center";
      context.textBaseline = "middle";
      context.fillText(text, (from + to - gap) / 2, top + height / 2 + ratio);
    }
  }

  // By version: a hue for each, light for forwards; what is no work is grey.
  versionStyle(lane, i) {
    const code = lane.kinds[i], kind = KINDS[code];
    if (code < 2) return versionColour(lane.versions[i], code === 0, this.colours.dark) || this.colours[kind.key];
    return PLAIN.has(kind.key) ? this.colours.line : this.colours[kind.key];
  }

  drawNames(context) {
    const {ratio, colours, place} = this, size = Math.max(9, Math.min(12.5, place.height));
    context.fillStyle = colours.page;
    context.fillRect(0, 0, this.left - 4 * ratio, this.canvas.height);
    context.textBaseline = "middle";
    this.model.lanes.forEach((lane, number) => {
      const y = (place.tops[number] + place.height / 2) * ratio;
      context.font = `${size * ratio}px system-ui, "DejaVu Sans", sans-serif`;
      context.textAlign = "left";
      context.fillStyle = colours.ink;
      context.fillText(lane.name, 10 * ratio, y);
      context.textAlign = "right";
      context.fillStyle = colours.dim;
      context.fillText((100 * lane.utilisation).toFixed(0) + "%", this.left - 10 * ratio, y);
    });
  }

  drawHover(context, view, hover) {
    const {ratio, place} = this, outlined = sameMicroBatch(this.model, this.model.lanes[hover.lane], hover.span);
    context.save();
    context.beginPath();
    context.rect(this.left, 0, this.right - this.left, this.canvas.height);
    context.clip();
    context.strokeStyle = this.colours.ink;
    for (const [number, i] of outlined.length ? outlined : [[hover.lane, hover.span]]) {
      const lane = this.model.lanes[number], from = this.x(view, lane.start[i]), to = this.x(view, lane.end[i]);
      context.lineWidth = (number === hover.lane && i === hover.span ? 2.4 : 1.5) * ratio;
      context.strokeRect(from, place.tops[number] * ratio, Math.max(to - from, 1), place.height * ratio);
    }
    context.restore();
  }
}

// Adds the time of a span narrower than a pixel to the one or two pixel columns that it touches.
function addColumn(columns, kind, from, to, width) {
  const first = Math.floor(from), last = Math.floor(to);
  if (last < 0 || first >= width) return false;
  if (first >= 0) columns[first * KINDS.length + kind] += Math.min(to, first + 1) - from;
  if (last > first && last < width) columns[last * KINDS.length + kind] += to - last;
  return true;
}

// Means over the columns around each: without them the beat of spans against pixels would look like something.
function smoothed(columns, width, radius) {
  const result = new Float32Array(columns.length), sums = new Float64Array(KINDS.length);
  for (let x = -radius; x < width; x++) {
    for (let kind = 0; kind < KINDS.length; kind++) {
      if (x + radius < width) sums[kind] += columns[(x + radius) * KINDS.length + kind];
      if (x - radius - 1 >= 0) sums[kind] -= columns[(x - radius - 1) * KINDS.length + kind];
      const count = Math.min(width, x + radius + 1) - Math.max(0, x - radius);
      if (x >= 0) result[x * KINDS.length + kind] = Math.max(0, sums[kind]) / count;
    }
  }
  return result;
}

function tickStep(span, ticks) {
  let step = 1e-4;
  for (;;) {
    for (const factor of [1, 2, 5]) if (span / (step * factor) <= ticks) return step * factor;
    step *= 10;
  }
}

function formatTick(tick, step) {
  const digits = (unit) => Math.max(0, -Math.floor(Math.log10(step / unit) + 1e-9));
  return step >= 100 ? (tick / 1e3).toFixed(digits(1e3)) + " s" : tick.toFixed(digits(1)) + " ms";
}
