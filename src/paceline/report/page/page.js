"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const state = { shown: DATA.series.slice(), workers: DATA.default_workers, line: DATA.default_line };
const views = new Map();

function dark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function theme() {
  const css = getComputedStyle(document.documentElement);
  const colour = (name) => css.getPropertyValue(name).trim();
  return {
    background: "transparent", font: "system-ui, sans-serif",
    axis: { labelColor: colour("--soft"), titleColor: colour("--soft"), gridColor: colour("--line"), domainColor: colour("--line"),
      tickColor: colour("--line"), titleFontWeight: "normal", labelFontSize: 11, titleFontSize: 12 },
    legend: { labelColor: colour("--ink"), titleColor: colour("--soft"), labelFontSize: 11 },
    view: { stroke: "transparent" },
  };
}

async function draw(holder) {
  const chart = DATA.charts[holder.dataset.chart];
  const spec = structuredClone(chart.spec);
  for (const param of spec.params) if (param.name in state) param.value = state[param.name];
  spec.data = { values: DATA.tables[chart.table] };
  const options = { actions: false, renderer: "svg", mode: "vega-lite", logLevel: 1, config: theme(), tooltip: { theme: dark() ? "dark" : "light" } };
  views.get(holder)?.finalize();
  const result = await vegaEmbed(holder, spec, options);
  views.set(holder, result.view);
  holder.dataset.drawn = "true";
}

let queue = Promise.resolve();
function drawLater(holder) {
  if (holder.dataset.drawn || holder.dataset.queued) return queue;
  holder.dataset.queued = "true";
  queue = queue.then(() => draw(holder)).catch((error) => { holder.textContent = "this chart could not be drawn: " + error; console.error(error); });
  return queue;
}

function drawAll() { document.querySelectorAll(".chart").forEach(drawLater); return queue; }

async function set(name, value) {
  state[name] = value;
  for (const [holder, view] of views) {
    if (DATA.charts[holder.dataset.chart].spec.params.some((p) => p.name === name)) { view.signal(name, value); await view.runAsync(); }
  }
}

// --- choosing

for (const box of document.querySelectorAll("input[data-series]")) {
  box.addEventListener("change", () => {
    const chosen = [...document.querySelectorAll("input[data-series]:checked")].map((b) => b.dataset.series);
    set("shown", chosen);
  });
}
for (const button of document.querySelectorAll("button[data-choose]")) {
  button.addEventListener("click", () => {
    const all = button.dataset.choose === "all";
    document.querySelectorAll("input[data-series]").forEach((b) => { b.checked = all; });
    set("shown", all ? DATA.series.slice() : []);
  });
}
document.getElementById("workers")?.addEventListener("change", (e) => set("workers", Number(e.target.value)));
document.getElementById("line")?.addEventListener("change", (e) => set("line", e.target.value));
document.getElementById("theme").addEventListener("click", async () => {
  document.documentElement.dataset.theme = dark() ? "light" : "dark";
  for (const holder of views.keys()) await draw(holder);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", async () => { for (const holder of views.keys()) await draw(holder); });

// --- any two settings side by side

function format(value, kind) {
  if (value === null || value === undefined) return "–";
  if (kind === "percent") return (100 * value).toFixed(2) + "%";
  if (kind === "bytes") { for (const [u, s] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) if (value >= s) return (value / s).toPrecision(3) + " " + u; return value.toFixed(0) + " B"; }
  if (kind === "ms") return value.toFixed(2) + " ms";
  return Number(value.toPrecision(4)).toLocaleString("en") + (kind === "s" ? " s" : kind === "x" ? "x" : "");
}

function letterOf(key, a, b) { // the verdicts of noise.py; a letter is explained in tables.py
  const [i, j] = [a, b].map((row) => DATA.tables.lines.indexOf(row));
  return i === j ? "n" : DATA.verdicts[key][Math.max(i, j)][Math.min(i, j)];
}

function compare() {
  const [a, b] = ["one", "other"].map((id) => DATA.tables.lines.find((row) => row.id === document.getElementById(id).value));
  const body = document.getElementById("pair");
  body.replaceChildren();
  for (const [key, title, kind, better] of DATA.compared) {
    const x = a[key], y = b[key];
    if ((x === null || x === undefined) && (y === null || y === undefined)) continue;
    const known = x !== null && y !== null && x !== undefined && y !== undefined;
    const letter = known ? letterOf(key, a, b) : "-";
    const how = { r: ", in every run", t: "", o: " (seen in one run)" }[letter];
    let verdict = "";
    if (known && x === y) verdict = "the same";
    else if (known && kind === "bytes" && key.endsWith("sent_bytes")) verdict = better ? (x < y ? a.id : b.id) + " sends less" : "they differ";
    else if (letter === "1") verdict = "one run each: too close to tell";
    else if (letter === "n") verdict = "within noise";
    else if (how !== undefined && better) verdict = ((x < y) === (better === "low") ? a.id : b.id) + " is better" + how;
    else if (how !== undefined) verdict = "they differ" + how;
    const row = document.createElement("tr");
    for (const text of [title, format(x, kind), format(y, kind), known && x ? (y / x).toPrecision(3) : "–", verdict]) {
      const cell = document.createElement("td");
      cell.textContent = text;
      row.append(cell);
    }
    row.firstChild.className = row.lastChild.className = "text";
    body.append(row);
  }
}
if (document.getElementById("pair")) {
  for (const id of ["one", "other"]) document.getElementById(id).addEventListener("change", compare);
  compare();
}

// --- drawing: what is in sight first, the rest when there is time, all of it before printing

const sight = new IntersectionObserver((entries) => { for (const e of entries) if (e.isIntersecting) drawLater(e.target); }, { rootMargin: "400px" });
document.querySelectorAll(".chart").forEach((holder) => sight.observe(holder));
setTimeout(drawAll, 400);
addEventListener("beforeprint", drawAll);
