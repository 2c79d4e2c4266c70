// The table below the timeline.
const SHARE_COLOURS = {
  forward: "F", backward: "B", "warm-up": "warm-up", drain: "drain", activation: "activation", gradient: "gradient",
  send: "send", agreement: "agreement", update: "U", data: "data", evaluate: "evaluate", checkpoint: "checkpoint",
  framework: "framework",
};
// As in the table that the command prints.
const SHORT_TITLES = {activation: "activ.", agreement: "agree", evaluate: "val.", checkpoint: "save", framework: "rest"};

function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const percent = (share) => (share === null ? "–" : (100 * share).toFixed(1));

function shareBar(shares) {
  const bar = element("div", {class: "shares"});
  for (const [cause, share] of Object.entries(shares)) {
    if (share <= 0) continue;
    bar.append(element("span", {
      style: `width:${100 * share}%;background:var(--${SHARE_COLOURS[cause]})`, title: `${cause}: ${percent(share)} %`,
    }));
  }
  return bar;
}

function reportTable(summary) {
  const all = [...summary.rows, summary.total];
  const causes = Object.keys(summary.total.shares).filter((c) => c !== "forward" && c !== "backward" && all.some((row) => row.shares[c] >= 0.0005));
  const titles = ["", "% of the elapsed time", "busy", "ideal", ...causes.map((c) => SHORT_TITLES[c] || c),
    "F ms", "B ms", "sent", "weights", "stale", "hidden"];
  const table = element("table", {}, element("tr", {}, ...titles.map((title) => element("th", {}, title))));
  for (const row of all) {
    const cells = [percent(row.utilisation), percent(row.ideal), ...causes.map((cause) => percent(row.shares[cause])),
      row.forward_ms.toFixed(2), row.backward_ms.toFixed(2), formatBytes(row.bytes_sent),
      row.versions ? `W${row.versions[0]}–W${row.versions[1]}` : "–", row.versions ? row.staleness : "–", percent(row.hidden)];
    table.append(element("tr", row === summary.total ? {class: "total"} : {}, element("td", {}, row.name),
      element("td", {class: "bar"}, shareBar(row.shares)),
      ...cells.map((cell) => element("td", cell === "0.0" || cell === "–" ? {class: "none"} : {}, cell))));
  }
  return table;
}

function fillReport(model) {
  document.getElementById("facts").textContent = model.facts;
  document.getElementById("table").append(reportTable(model.summary));
  for (const statement of model.statements) {
    const bad = statement.startsWith("STALENESS") || statement.startsWith("  -");
    document.getElementById("statements").append(element("li", bad ? {class: "bad"} : {}, statement.trim()));
  }
  const warning = document.getElementById("warning");
  warning.hidden = !model.summary.violated;
  warning.textContent = model.summary.violated ? "Staleness violated: see below." : "";
}
