// The whole recording in one strip: how busy all stages together are, and which part is shown below.
const BUSY_BINS = 600;

function busyBins(model) {
  const bins = new Float32Array(BUSY_BINS * 2), width = model.length / BUSY_BINS;
  for (const lane of model.lanes) {
    for (let i = 0; i < lane.count; i++) {
      if (lane.kinds[i] > 1) continue;
      for (let bin = Math.floor(lane.start[i] / width); bin <= lane.end[i] / width && bin < BUSY_BINS; bin++) {
        const inside = Math.min(lane.end[i], (bin + 1) * width) - Math.max(lane.start[i], bin * width);
        if (bin >= 0) bins[bin * 2 + lane.kinds[i]] += Math.max(0, inside) / width / model.lanes.length;
      }
    }
  }
  return bins;
}

function drawOverview(canvas, model, view) {
  const ratio = window.devicePixelRatio || 1, context = canvas.getContext("2d"), colours = readPalette();
  canvas.width = Math.round(canvas.clientWidth * ratio);
  canvas.height = Math.round(canvas.clientHeight * ratio);
  const left = GUTTER * ratio, width = canvas.width - left, height = canvas.height;
  model.bins = model.bins || busyBins(model);
  context.fillStyle = colours.lane;
  context.fillRect(left, 0, width, height);
  for (let bin = 0; bin < BUSY_BINS; bin++) {
    const x = left + (bin * width) / BUSY_BINS, forward = model.bins[bin * 2] * height, backward = model.bins[bin * 2 + 1] * height;
    context.fillStyle = colours.F;
    context.fillRect(x, height - forward, width / BUSY_BINS + 0.6, forward);
    context.fillStyle = colours.B;
    context.fillRect(x, height - forward - backward, width / BUSY_BINS + 0.6, backward);
  }
  const from = left + (view.start / model.length) * width, to = left + (view.end / model.length) * width;
  context.globalAlpha = 0.62;
  context.fillStyle = colours.page;
  context.fillRect(left, 0, from - left, height);
  context.fillRect(to, 0, canvas.width - to, height);
  context.globalAlpha = 1;
  context.strokeStyle = colours.accent;
  context.lineWidth = 2 * ratio;
  context.strokeRect(from, ratio, Math.max(to - from, 2 * ratio), height - 2 * ratio);
  context.fillStyle = colours.dim;
  context.font = `${11 * ratio}px system-ui, "DejaVu Sans", sans-serif`;
  context.textBaseline = "middle";
  context.fillText("all stages", 10 * ratio, height / 2);
}
