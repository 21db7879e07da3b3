"use strict";
// Plays panels on one clock. A page's own script makes the panels and calls `begin(panels)`.
// The picture is a function of `position`. A panel has a root element, `last` (its last step),
// when(step) (the position at which a step is complete) and draw(position).
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const safe = (text) => text.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
const round = (x) => Math.round(x * 100) / 100;
const STEP_MS = data.step_ms ?? 1100; // the mean step of the panel that has most
const still = matchMedia("(prefers-reduced-motion: reduce)");
let clock = "rounds"; // in the words of a page that has several clocks
let panels = [], most = 0;
let position = 0, target = 0, playing = false, before = null;
let where = () => `step ${Math.floor(position + 1e-9)} of ${most}`;

class Steps {
  constructor(s) {
    this.s = s;
    this.last = s.steps.length - 1;
    this.root = document.createElement("section");
    this.root.className = "panel";
  }

  // the step that is complete at a position, and the share of the next one that is over
  at(position) {
    for (let step = this.last; step > 0; step--) {
      const end = this.when(step);
      if (position >= end * (1 - 1e-9)) return [step, 0];
      const start = this.when(step - 1);
      if (position > start * (1 + 1e-9)) return [step - 1, (position - start) / (end - start)];
    }
    return [0, 0];
  }

  // let the buttons of this panel jump to their steps
  listen() {
    this.buttons = [...this.root.querySelectorAll("[data-step]")];
    for (const button of this.buttons)
      button.onclick = () => { stop(); jump(this.when(Number(button.dataset.step))); };
  }

  // mark the button of the step that is shown
  press(now) {
    for (const button of this.buttons)
      button.setAttribute("aria-current", String(Number(button.dataset.step) === now));
  }
}

// buttons of steps, which stand together by phase
function step_buttons(name, names) {
  const phases = [];
  names.forEach((phase, i) => {
    if (!phases.length || phases.at(-1)[0] !== phase) phases.push([phase, []]);
    phases.at(-1)[1].push(i);
  });
  return `<div class="steps" role="group" aria-label="steps of ${safe(name)}">${phases.map(([p, all]) =>
    `<span><i>${safe(p)}</i><span>${all.map((i) =>
      `<button data-step="${i}" title="step ${i}">${i}</button>`).join("")}</span></span>`
    ).join("")}</div>`;
}

// --- the clock

const end = () => Math.max(...panels.map((p) => p.when(p.last)));
// every position at which a step of a panel ends
function marks() {
  const all = panels.flatMap((p) => [...Array(p.last + 1).keys()].map((step) => p.when(step)));
  all.sort((a, b) => a - b);
  return all.filter((at, i) => i === 0 || at - all[i - 1] > 1e-9 * at);
}

function draw() {
  for (const panel of panels) panel.draw(position);
  $("scrub").value = end() ? Math.round((1000 * position) / end()) : 0;
  $("where").textContent = where();
  $("play").textContent = playing ? "❚❚ pause" : "▶ play";
}
function jump(to) {
  position = target = Math.max(0, Math.min(end(), to));
  draw();
}
function stop() { playing = false; }
function tick(now) {
  if (before === null) return;
  const passed = Math.max(0, now - before) * Number($("speed").value);
  before = now;
  position = Math.min(target, position + (passed / STEP_MS) * (end() / Math.max(1, most)));
  if (target - position < 1e-9 * end()) {
    position = target;
    playing = false;
    before = null;
  }
  draw();
  if (before !== null) requestAnimationFrame(tick);
}
function run(to) {
  target = to;
  if (still.matches && !playing) return jump(to);
  if (before === null && target > position) {
    before = performance.now();
    requestAnimationFrame(tick);
  }
}
function settle() { // end a step that is under way at once
  if (before !== null && !playing) jump(target);
  before = null;
}
function next() {
  settle();
  stop();
  const to = marks().find((at) => at > position * (1 + 1e-9) + 1e-15);
  if (to !== undefined) run(to);
  else draw();
}
function back() {
  before = null;
  stop();
  jump(marks().filter((at) => at < position * (1 - 1e-9)).at(-1) ?? 0);
}
function play() {
  if (!end()) return;
  if (playing) {
    stop();
    before = null;
    target = position;
    return draw();
  }
  settle();
  if (position >= end() * (1 - 1e-9)) position = 0;
  playing = true;
  run(end());
  draw();
}
function ends(to) {
  before = null;
  stop();
  jump(to);
}

$("first").onclick = () => ends(0);
$("last").onclick = () => ends(end());
$("next").onclick = next;
$("back").onclick = back;
$("play").onclick = play;
$("scrub").oninput = () => ends((Number($("scrub").value) / 1000) * end());
document.addEventListener("keydown", (event) => {
  const typing = event.target instanceof HTMLElement && event.target.matches("input, select");
  const does = { ArrowLeft: back, ArrowRight: next, " ": play,
    Home: () => ends(0), End: () => ends(end()) }[event.key];
  if (!does || typing || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  does();
});

function begin(made) {
  panels = made;
  most = Math.max(...panels.map((p) => p.last));
  $("panels").className = panels.length > 1 ? "two" : "one";
  $("panels").append(...panels.map((p) => p.root));
}
function start(from) { // at the position that the address names (#3), or at this one
  const wanted = parseFloat(location.hash.slice(1));
  jump(wanted ? (clock === "rounds" ? wanted : (wanted / Math.max(1, most)) * end()) : from);
}
