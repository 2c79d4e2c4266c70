// The recording: spans of every lane in columns, and what can be asked of them. Times are in milliseconds.
const KINDS = [
  {key: "F", name: "forward", row: "work"}, {key: "B", name: "backward", row: "work"},
  {key: "U", name: "update", row: "work"}, {key: "activation", name: "wait: activation", row: "work"},
  {key: "gradient", name: "wait: gradient", row: "work"}, {key: "agreement", name: "wait: agreement", row: "work"},
  {key: "data", name: "wait: data", row: "work"}, {key: "send", name: "send", row: "top"},
  {key: "reduce", name: "reduce", row: "strip"}, {key: "drain", name: "drain", row: "strip"},
  {key: "evaluate", name: "validation", row: "work"}, {key: "checkpoint", name: "checkpoint", row: "work"},
];
const PER_MICRO_BATCH = new Set(["F", "B", "activation", "gradient", "send"]);

function readModel(text) {
  const data = JSON.parse(text);
  const lanes = data.lanes.map((lane) => {
    const count = lane.starts.length, start = new Float64Array(count), end = new Float64Array(count);
    const reach = new Float64Array(count); // the latest end so far: where a search for what is visible begins
    let time = 0, latest = -Infinity;
    for (let i = 0; i < count; i++) {
      time += lane.starts[i];
      start[i] = time * data.unit;
      end[i] = (time + lane.lengths[i]) * data.unit;
      latest = Math.max(latest, end[i]);
      reach[i] = latest;
    }
    return {...lane, count, start, end, reach};
  });
  const used = KINDS.map((_, code) => lanes.some((lane) => lane.kinds.includes(code)));
  return {...data, lanes, used, length: data.seconds * 1e3 + data.unit, places: new Map()};
}

// First span of a lane that may reach into the time from `time` on.
function firstVisible(lane, time) {
  let low = 0, high = lane.count;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (lane.reach[middle] < time) low = middle + 1; else high = middle;
  }
  return low;
}

// Forwards and backwards of one micro-batch on all lanes of its replica, as [lane, span] pairs.
function sameMicroBatch(model, lane, i) {
  if (lane.kinds[i] > 1) return [];
  if (!model.places.size) {
    model.lanes.forEach((other, place) => {
      for (let j = 0; j < other.count; j++) {
        if (other.kinds[j] > 1) continue;
        const key = other.replica + ":" + other.indices[j];
        if (!model.places.has(key)) model.places.set(key, []);
        model.places.get(key).push([place, j]);
      }
    });
  }
  return model.places.get(lane.replica + ":" + lane.indices[i]) || [];
}

function formatBytes(count) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (count >= size) return (count / size).toFixed(1) + " " + unit;
  }
  return count + " B";
}

function formatTime(ms, span) {
  if (span > 20000) return (ms / 1e3).toFixed(1) + " s";
  if (span > 2000) return (ms / 1e3).toFixed(3) + " s";
  return ms.toFixed(span > 20 ? 1 : 4 - Math.min(2, Math.max(0, Math.floor(Math.log10(span))))) + " ms";
}

// What a span is, as [name, value] pairs for the tooltip.
function describe(model, lane, i) {
  const kind = KINDS[lane.kinds[i]], rows = [["stage", lane.name]];
  if (PER_MICRO_BATCH.has(kind.key)) rows.push(["micro-batch", lane.indices[i]]);
  rows.push(["mini-batch", lane.batches[i]]);
  const version = lane.versions[i];
  if (version >= 0) rows.push(["weights", (kind.key === "U" ? "makes W" : "W") + version]);
  if (version >= 0 && kind.row === "work" && kind.key !== "U") rows.push(["staleness", lane.batches[i] - version]);
  if (lane.bytes[i]) rows.push(["bytes", lane.bytes[i].toLocaleString("en") + " (" + formatBytes(lane.bytes[i]) + ")"]);
  rows.push(["takes", (lane.end[i] - lane.start[i]).toPrecision(4) + " ms"]);
  rows.push(["from", formatTime(lane.start[i], model.length)]);
  return {title: kind.name, key: kind.key, rows};
}
