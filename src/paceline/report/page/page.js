"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
for (const [name, table] of Object.entries(DATA.tables)) {  // columns to rows
  if (Array.isArray(table)) continue;
  const keys = Object.keys(table), length = keys.length ? table[keys[0]].length : 0;
  DATA.tables[name] = Array.from({ length }, (_, i) =>
    Object.fromEntries(keys.map((key) => [key, table[key][i]])));
}
const state = {
  shown: (DATA.shown ?? DATA.series).slice(), workers: DATA.default_workers, line: DATA.default_line,
};
const views = new Map();

function dark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function theme() {
  const css = getComputedStyle(document.documentElement);
  const colour = (name) => css.getPropertyValue(name).trim();
  return {
    background: colour("--paper"), font: "system-ui, sans-serif",
    axis: {
      labelColor: colour("--soft"), titleColor: colour("--soft"), gridColor: colour("--line"),
      domainColor: colour("--line"), tickColor: colour("--line"), titleFontWeight: "normal",
      labelFontSize: 11, titleFontSize: 12,
    },
    header: { labelColor: colour("--ink") },
    title: { color: colour("--ink") },
    legend: { labelColor: colour("--ink"), titleColor: colour("--soft"), labelFontSize: 11 },
    view: { stroke: "transparent" },
  };
}

function described(holder) {
  const chart = DATA.charts[holder.dataset.chart];
  const spec = structuredClone(chart.spec);
  for (const param of spec.params) if (param.name in state) param.value = state[param.name];
  spec.data = { values: DATA.tables[chart.table] };
  const width = holder.clientWidth;
  if (spec.facet) {  // panels as wide as fit; Vega-Lite cannot fit them to their holder
    const least = 230, most = 380, axis = 46;
    const panels = state.shown.filter((s) => !s.startsWith("serial")).length;
    spec.columns = Math.max(1, Math.min(5, panels, Math.floor(width / least)));
    spec.spec.width = Math.min(most, Math.floor((width - 30) / spec.columns) - axis);
  } else if (spec.padding && width < 480) {
    spec.padding.right = 96;
  }
  return spec;
}

async function draw(holder) {
  const options = {
    actions: false, renderer: "svg", mode: "vega-lite", logLevel: 1, config: theme(),
    tooltip: { theme: dark() ? "dark" : "light" },
  };
  views.get(holder)?.finalize();
  const result = await vegaEmbed(holder, described(holder), options);
  views.set(holder, result.view);
  holder.dataset.drawn = "true";
}

let queue = Promise.resolve();
function drawLater(holder) {
  if (holder.dataset.drawn || holder.dataset.queued) return queue;
  holder.dataset.queued = "true";
  queue = queue.then(() => draw(holder)).catch((error) => {
    holder.textContent = "this chart could not be drawn: " + error;
    console.error(error);
  });
  return queue;
}

function drawAll() { document.querySelectorAll(".chart").forEach(drawLater); return queue; }

async function set(name, value) {
  state[name] = value;
  for (const [holder, view] of views) {
    const spec = DATA.charts[holder.dataset.chart].spec;
    if (spec.facet) {  // the panels are laid out again
      await draw(holder);
    } else if (spec.params.some((p) => p.name === name)) {
      view.signal(name, value);
      await view.runAsync();
    }
  }
}

// --- the reader chooses series, workers, a setting, and a theme

for (const box of document.querySelectorAll("input[data-series]")) {
  box.addEventListener("change", () => {
    const checked = [...document.querySelectorAll("input[data-series]:checked")];
    set("shown", checked.map((b) => b.dataset.series));
  });
}
for (const button of document.querySelectorAll("button[data-choose]")) {
  button.addEventListener("click", () => {
    const chosen = { all: DATA.series, best: DATA.shown, none: [] }[button.dataset.choose];
    document.querySelectorAll("input[data-series]").forEach((b) => {
      b.checked = chosen.includes(b.dataset.series);
    });
    set("shown", chosen.slice());
  });
}
const onChange = (id, act) => document.getElementById(id)?.addEventListener("change", act);
onChange("workers", (e) => set("workers", Number(e.target.value)));
onChange("line", (e) => set("line", e.target.value));

async function drawAgain() { for (const holder of views.keys()) await draw(holder); }
document.getElementById("theme").addEventListener("click", async () => {
  document.documentElement.dataset.theme = dark() ? "light" : "dark";
  await drawAgain();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAgain);

let width = innerWidth, soon = 0;
addEventListener("resize", () => {  // panels are drawn for a width
  clearTimeout(soon);
  soon = setTimeout(() => { if (innerWidth !== width) { width = innerWidth; drawAgain(); } }, 300);
});

// --- copy, unfold, download

function markdown(table) {
  const cells = (row) => [...row.children].filter((c) => !("skip" in c.dataset)).map(textOf);
  const textOf = (cell) => {
    const copy = cell.cloneNode(true);
    copy.querySelectorAll("br").forEach((br) => br.replaceWith(" "));
    const words = copy.textContent.trim().replace(/\s+/g, " ").replaceAll("|", "\\|");
    const name = cell.querySelector("code")?.textContent;
    return name ? words.replace(name, "`" + name + "`") : words;
  };
  const [head, ...rows] = [...table.querySelectorAll("tr")].map(cells);
  const rule = head.map((_, i) => (i ? "--:" : "---"));
  return [head, rule, ...rows].map((row) => "| " + row.join(" | ") + " |").join("\n") + "\n";
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // a page from a file, or a browser that asks first
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    if (!done) throw new Error("the browser refused");
  }
}

for (const button of document.querySelectorAll("button[data-copy]")) {
  const said = button.textContent;
  button.addEventListener("click", async () => {
    const text = button.dataset.copy === "markdown"
      ? markdown(document.getElementById("main"))
      : button.parentElement.querySelector("code").textContent;
    try { await copyText(text); button.textContent = "copied"; }
    catch (error) { button.textContent = "not copied: " + error.message; }
    setTimeout(() => { button.textContent = said; }, 1500);
  });
}

document.getElementById("unfold")?.addEventListener("click", (e) => {
  document.getElementById("main").classList.remove("folded");
  e.target.remove();
});

for (const button of document.querySelectorAll("button[data-save]")) {
  button.addEventListener("click", async () => {
    const figure = button.closest("figure"), holder = figure.querySelector(".chart");
    await drawLater(holder);
    const kind = button.dataset.save;
    const link = document.createElement("a");
    link.href = await views.get(holder).toImageURL(kind, 2);
    link.download = holder.dataset.chart + "." + kind;
    link.click();
  });
}

// --- two settings side by side

function format(value, kind) {
  if (value === null || value === undefined) return "–";
  if (kind === "percent") return (100 * value).toFixed(2) + "%";
  if (kind === "bytes") {
    const units = [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]];
    for (const [unit, size] of units) {
      if (value >= size) return (value / size).toPrecision(3) + " " + unit;
    }
    return value.toFixed(0) + " B";
  }
  if (kind === "ms") return value.toFixed(2) + " ms";
  const unit = { s: " s", x: "x" }[kind] ?? "";
  return Number(value.toPrecision(4)).toLocaleString("en") + unit;
}

// The verdict of judge.py on two rows, as a letter that `letter` in tables.py explains.
function letterOf(key, a, b) {
  const [i, j] = [a, b].map((row) => DATA.tables.lines.indexOf(row));
  return i === j ? "n" : DATA.verdicts[key][Math.max(i, j)][Math.min(i, j)];
}

function verdictOn(key, kind, better, a, b) {
  const x = a[key], y = b[key], letter = letterOf(key, a, b);
  const how = { t: "", o: " (seen in one run)" }[letter];
  if (x === y) return "the same";
  if (kind === "bytes" && key.endsWith("sent_bytes")) {
    return better ? (x < y ? a.id : b.id) + " sends less" : "they differ";
  }
  if (letter === "1") return "one run each: too close to tell";
  if (letter === "n") return "within noise";
  if (how === undefined) return "";
  if (!better) return "they differ" + how;
  return ((x < y) === (better === "low") ? a.id : b.id) + " is better" + how;
}

function compare() {
  const chosen = (id) => document.getElementById(id).value;
  const row = (id) => DATA.tables.lines.find((line) => line.id === chosen(id));
  const [a, b] = [row("one"), row("other")];
  const body = document.getElementById("pair");
  body.replaceChildren();
  for (const [key, title, kind, better] of DATA.compared) {
    const x = a[key] ?? null, y = b[key] ?? null;
    if (x === null && y === null) continue;
    const known = x !== null && y !== null;
    const ratio = known && x ? (y / x).toPrecision(3) : "–";
    const verdict = known ? verdictOn(key, kind, better, a, b) : "";
    const line = document.createElement("tr");
    for (const text of [title, format(x, kind), format(y, kind), ratio, verdict]) {
      const cell = document.createElement("td");
      cell.textContent = text;
      line.append(cell);
    }
    line.firstChild.className = line.lastChild.className = "text";
    body.append(line);
  }
}
if (document.getElementById("pair")) {
  for (const id of ["one", "other"]) onChange(id, compare);
  compare();
}

// --- draw the charts in sight first, the rest soon after, and all of them before printing

const drawVisible = (entries) => {
  for (const entry of entries) if (entry.isIntersecting) drawLater(entry.target);
};
const sight = new IntersectionObserver(drawVisible, { rootMargin: "400px" });
document.querySelectorAll(".chart").forEach((holder) => sight.observe(holder));
setTimeout(drawAll, 400);
addEventListener("beforeprint", drawAll);
