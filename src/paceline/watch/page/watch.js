"use strict";
// Draws the picture that the server sends. It builds elements and never HTML from text, so that
// nothing in a record can become part of the page.

const id = (name) => document.getElementById(name);
const SVG = "http://www.w3.org/2000/svg";
let picture = null;
let byTime = 1; // place of x in a point: 0 steps, 1 seconds of training
let chosen = null; // the run of a study that the user clicked
let source = null;
let over = false; // the server has said that it ends

function make(name, attributes = {}, ...inside) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") node.className = value;
    else if (value !== null) node.setAttribute(key, value);
  }
  node.append(...inside.filter((one) => one !== null));
  return node;
}

function draw(parent, name, attributes, text = null) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  parent.append(node);
  return node;
}

// --- numbers with units

function seconds(value) {
  if (!known(value)) return "–";
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 120) return `${value.toFixed(0)} s`;
  if (value < 7200) return `${(value / 60).toFixed(0)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

function bytes(value) {
  if (!known(value)) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let place = 0;
  while (value >= 1000 && place < units.length - 1) { value /= 1000; place += 1; }
  return `${value >= 100 || place === 0 ? value.toFixed(0) : value.toPrecision(3)} ${units[place]}`;
}

const known = (value) => value !== null && value !== undefined;
const whole = (value) => known(value) ? Math.round(value).toLocaleString("en") : "–";
const percent = (share, digits = 0) => `${(100 * share).toFixed(digits)}%`;

function measured(name, value) {
  if (!known(value)) return "–";
  return name === "accuracy" ? percent(value, 2) : Number(value).toPrecision(4);
}

// --- charts

function ticks(low, high, most) {
  const rough = (high - low) / most || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(at);
  return found.map((at) => [at, Number(at.toPrecision(12)), step]);
}

function label(value, step) {
  const digits = Math.max(0, Math.min(8, -Math.floor(Math.log10(step) + 1e-9)));
  return value >= 10000 ? whole(value) : value.toFixed(digits);
}

function chart(svg, curves, format, nothing) {
  svg.replaceChildren();
  const width = svg.clientWidth || 400, height = svg.clientHeight || 250;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const points = curves.flatMap((curve) => curve.points);
  if (!points.length) {
    draw(svg, "text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, nothing);
    return;
  }
  const left = 58, right = 12, top = 10, bottom = 34;
  const most = Math.max(...points.map((p) => p[byTime])) || 1;
  let low = Math.min(...points.map((p) => p[2])), high = Math.max(...points.map((p) => p[2]));
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  low = low >= 0 && low - room < 0 ? 0 : low - room;
  high += room;
  const x = (value) => left + ((width - left - right) * value) / most;
  const y = (value) => height - bottom - ((height - top - bottom) * (value - low)) / (high - low);
  for (const [at, value, step] of ticks(low, high, 5)) {
    draw(svg, "line", { class: "axis", x1: left, x2: width - right, y1: y(at), y2: y(at) });
    draw(svg, "text", { x: left - 8, y: y(at) + 4, "text-anchor": "end" }, format(value, step));
  }
  for (const [at, value, step] of ticks(0, most, width < 420 ? 4 : 7)) {
    const text = label(value, step) + (byTime ? " s" : "");
    draw(svg, "text", { x: x(at), y: height - bottom + 18, "text-anchor": "middle" }, text);
  }
  for (const curve of curves) {
    const path = curve.points.map((p) => `${x(p[byTime]).toFixed(1)},${y(p[2]).toFixed(1)}`);
    draw(svg, "polyline", { class: `line ${curve.kind}`, points: path.join(" ") });
    if (curve.points.length <= 60) {
      for (const p of curve.points) {
        const r = curve.kind === "test" ? 3 : 1.5;
        draw(svg, "circle", { class: `dot ${curve.kind}`, cx: x(p[byTime]), cy: y(p[2]), r });
      }
    }
  }
  const mark = draw(svg, "g", {});
  svg.onpointermove = (event) => {
    const at = event.clientX - svg.getBoundingClientRect().left;
    const near = (curve) => curve.points.reduce(
      (best, p) => Math.abs(x(p[byTime]) - at) < Math.abs(x(best[byTime]) - at) ? p : best);
    mark.replaceChildren();
    const found = curves.filter((c) => c.points.length).map((c) => [c, near(c)]);
    const place = x(found[0][1][byTime]);
    draw(mark, "line", { class: "cross", x1: place, x2: place, y1: top, y2: height - bottom });
    const said = found.map(([c, p]) => `${c.name} ${c.show(p[2])}`).join(" · ");
    const first = found[0][1];
    const anchor = place > width / 2 ? "end" : "start";
    draw(mark, "text", { class: "read", x: place + (anchor === "end" ? -6 : 6), y: top + 12,
      "text-anchor": anchor }, `step ${whole(first[0])}, ${seconds(first[1])}: ${said}`);
  };
  svg.onpointerleave = () => mark.replaceChildren();
}

function drawCharts(run) {
  const name = run.metric.name || "accuracy";
  id("metric-name").textContent = `${name} on the ${run.metric.on || "test"} set`;
  const format = (value, step) =>
    name === "accuracy" ? percent(value, step < 0.01 ? 1 : 0) : label(value, step);
  chart(id("metric"), [{ kind: "test", name, points: run.curves.metric,
    show: (v) => measured(name, v) }], format,
    run.status === null ? "measured at the first evaluation" : "the run was not evaluated");
  const curves = [
    { kind: "train", name: "training", points: run.curves.loss, show: (v) => v.toPrecision(4) },
    { kind: "test", name: "test", points: run.curves.test_loss, show: (v) => v.toPrecision(4) },
  ].filter((curve) => curve.points.length);
  const caption = id("loss-name");
  caption.replaceChildren("loss: ");
  for (const [kind, text] of [["train", "training"], ["test", "test"]]) {
    if (kind === "train" && run.private && !run.curves.loss.length) continue;
    const key = document.createElementNS(SVG, "svg");
    for (const [k, v] of [["width", 22], ["height", 10], ["class", "key"]]) key.setAttribute(k, v);
    draw(key, "line", { class: `line ${kind}`, x1: 1, x2: 19, y1: 5, y2: 5 });
    caption.append(key, `${text} `);
  }
  if (run.private && !run.curves.loss.length) {
    caption.append("(a private run hides its training loss)");
  }
  chart(id("loss"), curves, label, "no step yet");
  id("metric").setAttribute("aria-label", `${name} as training goes on`);
  id("loss").setAttribute("aria-label", "loss as training goes on");
}

// --- tables

function heads(table, names) {
  if (table.tHead.rows.length && table.tHead.rows[0].cells.length === names.length) return;
  table.tHead.replaceChildren(make("tr", {}, ...names.map(([text, kind, title]) =>
    make("th", { class: kind || "", title: title || null }, text))));
}

const PARTS = { compute: "computing", codec: "encoding", exchange: "exchanging", idle: "waiting",
  together: "computing and exchanging, not separated" };

function drawRanks(run) {
  const table = id("ranks");
  heads(table, [["rank"], ["last steps: computing / exchanging / waiting", "text"],
    ["speed", "", "samples per second of computing, against the median worker"],
    ["samples/s"], ["step"], ["sent"], ["CPU"], ["memory"]]);
  const hosts = run.ranks.some((rank) => rank.host);
  table.tBodies[0].replaceChildren(...run.ranks.map((rank) => {
    const chip = make("span", { class: "chip" });
    chip.style.background = `var(--worker-${rank.rank % 16})`;
    const shares = make("td", { class: "text" });
    if (rank.shares) {
      const bar = make("span", { class: "shares" });
      for (const [part, share] of Object.entries(rank.shares)) {
        const piece = make("i", { class: part, title: `${PARTS[part]} ${percent(share)}` });
        piece.style.width = percent(share, 2);
        piece.style.background = `var(--worker-${rank.rank % 16})`;
        bar.append(piece);
      }
      const s = rank.shares;
      const numbers = s.together ? "not separated"
        : `${percent(s.compute + s.codec)} / ${percent(s.exchange)} / ${percent(s.idle)}`;
      shares.append(bar, make("span", { class: "numbers" }, numbers));
    } else shares.append(rank.role === "server" ? "serves the workers" : "–");
    const name = `${rank.role} ${rank.rank}` + (hosts && rank.host ? ` on ${rank.host}` : "");
    return make("tr", { "data-rank": rank.rank },
      make("td", {}, chip, name), shares,
      make("td", {}, rank.speed === null ? "–" : `${rank.speed.toFixed(2)}x`),
      make("td", {}, whole(rank.samples_per_s)), make("td", {}, whole(rank.step)),
      make("td", {}, bytes(rank.sent_bytes)),
      make("td", {}, rank.cpu_percent === null ? "–" : `${rank.cpu_percent.toFixed(0)}%`),
      make("td", {}, bytes(rank.memory_bytes)));
  }));
  id("ranks-note").textContent = run.ranks.length
    ? (run.waits ? `${run.waits[0].toUpperCase()}${run.waits.slice(1)}. ` : "")
      + "Full colour: computing; pale: exchanging; empty: waiting for the last worker. Shares and"
      + " speeds are of the last 200 steps; speed counts computing only, against the median worker."
      + (run.ranks.some((r) => r.shares && r.shares.codec) ? " Encoding counts as computing." : "")
      + (run.ranks.some((r) => r.role === "server" && r.sent_bytes === null)
        ? " What a server sends through shared memory is counted at the end." : "")
      + (hosts ? " On several hosts waiting cannot be told from exchanging." : "")
    : "No worker has written an event yet.";
}

let drawnRows = "";

function drawStudy(study, shown) {
  id("study").hidden = !study;
  if (!study) return;
  const tiles = [[`${study.done} of ${study.planned}`, "runs done"]];
  if (study.failed) tiles.push([study.failed, "of them failed"]);
  if (study.left_s !== null) tiles.push([`about ${seconds(study.left_s)}`, "left"]);
  tiles.push([seconds(study.spent_s), "spent on runs so far"]);
  if (study.cut) tiles.push([study.cut, "were run: the budget of time ended"]);
  if (study.confirm) {
    const { blocks, wanted } = study.confirm;
    tiles.push([wanted ? `${blocks} of ${wanted}` : blocks, "blocks that confirm the best"]);
  }
  drawTiles(id("study-tiles"), tiles);
  id("study-bar").style.width = percent(study.planned ? study.done / study.planned : 0, 1);
  const rows = JSON.stringify([study.rows, study.current, shown]);
  if (rows === drawnRows) return; // a button that has the focus keeps it
  drawnRows = rows;
  const first = study.rows.find((row) => row.metric);
  const metric = first ? first.metric.name : "accuracy";
  const secret = study.rows.some((row) => row.epsilon !== null);
  const table = id("settings");
  table.tHead.replaceChildren();
  heads(table, [["setting"], ["workers"], ["runs", "text"], ["training time"], ["samples/s"],
    [metric], ...(secret ? [["epsilon"]] : []), ["sent per worker and step"]]);
  table.tBodies[0].replaceChildren(...study.rows.map((row) => {
    const runs = make("td", { class: "text runs" });
    for (const run of row.runs) {
      const said = `${run.name}: ${run.status}`;
      const button = make("button", { "data-run": run.name, title: said, "aria-label": said });
      button.className = `run ${run.status}${run.name === shown ? " shown" : ""}`;
      button.disabled = run.status === "planned";
      button.addEventListener("click", () => { chosen = run.name; connect(); });
      runs.append(button);
    }
    const now = row.runs.some((run) => run.name === study.current);
    const name = make("td", {}, row.label);
    if (row.error) name.append(make("div", { class: "bad" }, row.error));
    return make("tr", { class: now ? "now" : "" }, name,
      make("td", {}, row.workers ? whole(row.workers) : "–"), runs,
      make("td", {}, seconds(row.train_s)), make("td", {}, whole(row.samples_per_s)),
      make("td", {}, row.metric ? measured(row.metric.name, row.metric.value) : "–"),
      ...(secret ? [make("td", {}, row.epsilon === null ? "–" : row.epsilon.toFixed(2))] : []),
      make("td", {}, bytes(row.step_bytes)));
  }));
}

// --- the whole page

function drawTiles(parent, tiles) {
  parent.replaceChildren(...tiles.map(([value, name]) =>
    make("div", { class: "tile" }, make("b", {}, String(value)), make("span", {}, name))));
}

function drawRun(run, inStudy) {
  id("run").hidden = !run;
  if (!run) return;
  id("run-name").hidden = !inStudy;
  id("run-name").textContent = run.name + (run.status === null ? "" : `: ${run.status}`);
  const of = run.total === null ? "" : ` of ${whole(run.total)}`;
  const tiles = [[whole(run.step) + of, "steps"]];
  if (run.status === null) {
    if (run.left_s !== null) tiles.push([seconds(run.left_s), "of training left"]);
    else if (run.until) tiles.push(["open", run.until]);
  }
  tiles.push([seconds(run.train_s), "of training" + (run.status === null ? " so far" : "")]);
  if (run.epochs) tiles.push([`${run.epoch} of ${run.epochs}`, "epoch"]);
  if (run.samples_per_s !== null) tiles.push([whole(run.samples_per_s), "samples/s, last steps"]);
  const last = (curve) => curve.length ? curve[curve.length - 1][2] : null;
  const { name } = run.metric;
  if (name) tiles.push([measured(name, last(run.curves.metric)), name]);
  if (run.curves.loss.length) tiles.push([last(run.curves.loss).toPrecision(4), "training loss"]);
  if (run.epsilon !== null) {
    tiles.push([run.epsilon.toFixed(2), "epsilon spent" + (run.status === null ? " so far" : "")]);
  }
  drawTiles(id("tiles"), tiles);
  const share = run.total ? Math.min(1, run.step / run.total) : Number(run.status !== null);
  id("bar").style.width = percent(share, 1);
  drawCharts(run);
  drawRanks(run);
}

function drawNotes(run, study) {
  const faults = [...(run ? run.faults : []), ...(study ? study.faults : [])];
  const items = faults.map((text) => make("li", { class: "warn" }, text));
  const notices = [...(study ? study.notices : []), ...(run ? run.notices : [])];
  for (const notice of notices.sort((a, b) => b.t - a.t)) {
    const at = new Date(1000 * notice.t);
    items.push(make("li", {}, make("time", {}, at.toLocaleTimeString("en-GB")), notice.text));
  }
  id("notes").hidden = !items.length;
  id("notices").replaceChildren(...items);
}

function ending(run) {
  const result = run.result || {};
  const metric = result.metric && result.metric.value !== null ? result.metric
    : result.test_accuracy !== null ? { name: "accuracy", value: result.test_accuracy } : null;
  const measure = metric ? `${metric.name} ${measured(metric.name, metric.value)} after ` : "";
  const made = `${measure}${whole(result.steps)} steps in ${seconds(result.train_s)} of training`;
  if (run.status === "completed") return `Completed: ${made} (${seconds(result.wall_s)} in all).`;
  if (run.status === "failed") return `Failed: ${run.error}`;
  return `Interrupted after ${whole(result.steps)} steps.`;
}

function show() {
  const { study, run } = picture;
  const waiting = !run && !study;
  const going = study && study.over ? "completed" : study && study.current ? "training" : "waiting";
  const state = study ? going : run ? run.status || run.phase : "waiting";
  id("state").className = `state ${state}`;
  id("state").textContent = state;
  id("title").textContent = study ? study.title : run ? run.title : "Nothing has begun here yet";
  id("subtitle").textContent = study ? study.question || "" : run ? run.settings.join(" · ")
    : `This page waits for a run or a study in ${picture.folder} and shows it when it begins.`;
  const share = study ? `${study.done}/${study.planned} `
    : run && run.total && !run.status ? `${percent(run.step / run.total)} ` : "";
  document.title = share + id("title").textContent;
  const said = [];
  if (run && run.status && !study) said.push(ending(run));
  if (run && run.status === "failed" && study) said.push(ending(run));
  if (run && run.reading !== null) said.push(`Reading the records: ${percent(run.reading)}.`);
  if (run && run.reading === null && run.silent_s > 15) {
    said.push(`No rank has written anything for ${seconds(run.silent_s)}.`);
  }
  if (over) {
    said.push(`The command has ended, and this page with it: paceline watch ${picture.folder}`
      + " shows it again.");
  }
  id("banner").hidden = !said.length;
  id("banner").className = `banner ${run && run.status ? run.status : ""}`;
  id("banner").textContent = said.join("\n");
  drawStudy(study, run ? run.name : null);
  drawRun(run, Boolean(study));
  drawNotes(run, study);
  id("foot").textContent = waiting ? "" : `paceline watch ${picture.folder}`;
  document.body.dataset.shown = run ? `${run.name} ${run.step} ${run.status || run.phase}` : state;
}

function connect() {
  if (source) source.close();
  source = new EventSource("/stream" + (chosen ? `?run=${encodeURIComponent(chosen)}` : ""));
  source.onmessage = (event) => {
    picture = JSON.parse(event.data);
    over = picture.closing;
    if (over) source.close();
    show();
  };
  source.onerror = () => {
    if (over) return;
    id("state").className = "state lost";
    id("state").textContent = "connection lost";
  };
}

for (const button of document.querySelectorAll("button[data-x]")) {
  button.addEventListener("click", () => {
    byTime = Number(button.dataset.x);
    for (const other of document.querySelectorAll("button[data-x]")) {
      other.setAttribute("aria-pressed", String(other === button));
    }
    if (picture && picture.run) drawCharts(picture.run);
  });
}
addEventListener("resize", () => { if (picture && picture.run) drawCharts(picture.run); });
connect();
