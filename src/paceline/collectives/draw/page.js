// The page of schedules. Its clock counts rounds, or seconds of the cost model; a panel at time
// t = k + f shows the state after step k and, for f > 0, round k + 1 under way.
const chosen = { ...data.chosen };
clock = data.scenes.length > 1 ? "seconds" : "rounds";

// --- cost: the sum of cost.py over the loads that Python computed

const of = (what) => data.choices[what][chosen[what]].value;
const lasting = (loads) => of("latency")
  + of("size") * Math.max(...loads.map(([moved, added]) =>
    (moved * 8) / of("bandwidth") + added * data.s_per_byte_added));
const seconds = (loads) => loads.reduce((sum, each) => sum + lasting(each), 0);

function time(s) {
  const [unit, word] = s >= 1 ? [1, "s"] : s >= 1e-3 ? [1e-3, "ms"] : [1e-6, "µs"];
  return `${(s / unit).toPrecision(3).replace(/\.?0+e/, "e")} ${word}`;
}
function bytes(n) {
  const [unit, word] = n >= 1e9 ? [1e9, "GB"] : n >= 1e6 ? [1e6, "MB"]
    : n >= 1e3 ? [1e3, "kB"] : [1, "B"];
  return `${Number((n / unit).toPrecision(3))} ${word}`;
}

function tabulate() {
  for (const what of ["latency", "bandwidth", "size"])
    $(`${what}-is`).textContent = data.choices[what][chosen[what]].label;
  const times = data.rows.map((row) => seconds(row.loads));
  const longest = Math.max(...times, 1e-12);
  $("table").tBodies[0].innerHTML = data.rows.map((row, i) =>
    `<tr class="${row.drawn ? "drawn" : ""}" data-name="${safe(row.name)}" data-seconds="${times[i]}">`
    + `<td>${safe(row.name)}</td><td>${row.loads.length}</td>`
    + `<td>${bytes(of("size") * Math.max(...row.sent))}</td>`
    + `<td>${bytes(of("size") * row.sent.reduce((a, b) => a + b, 0))}</td>`
    + `<td>${time(times[i])}</td>`
    + `<td><div class="bar" style="width:${round((100 * times[i]) / longest)}%"></div></td></tr>`
  ).join("");
}

// --- drawing

function bands(kind, x, y, width, height, changed) {
  const tall = height / Math.max(1, kind.ranks.length);
  let out = "";
  kind.ranks.forEach((rank, i) => {
    out += `<rect x="${round(x)}" y="${round(y + i * tall)}" width="${round(width)}"`
      + ` height="${round(tall)}" fill="var(--worker-${rank})"/>`;
    if (tall >= 9 && width >= 7 * String(rank).length)
      out += `<text class="digit" x="${round(x + width / 2)}" y="${round(y + (i + 0.5) * tall + 3)}"`
        + ` fill="${data.inks[rank]}">${rank}</text>`;
  });
  const narrow = width < 6; // a frame would hide the colours: a complete chunk is underlined
  if (narrow && kind.complete)
    out += `<rect class="complete" x="${round(x - 0.4)}" y="${round(y + height + 0.8)}"`
      + ` width="${round(width + 0.8)}" height="3" fill="var(--good)"/>`;
  const look = `frame${changed ? " changed" : ""}${narrow ? " narrow" : ""}`
    + (kind.complete && !narrow ? " complete" : "");
  return `${out}<rect class="${look}" x="${round(x)}" y="${round(y)}" width="${round(width)}"`
    + ` height="${round(height)}" rx="1.5"/>`;
}

function ranks(s, step, fresh) {
  const [width, height] = s.size, shown = s.steps[step];
  const changed = new Set(fresh ? shown.changed.map(String) : []);
  const pitch = (width - 8) / s.chunks, gap = Math.min(3, pitch * 0.2);
  return s.places.map(([x, y], rank) => {
    const left = x - width / 2, top = y - height / 2;
    return `<g><title>rank ${rank}: ${shown.cells[rank].map((k, c) =>
      `chunk ${c} holds ${s.kinds[k].text}`).join(", ")}</title>`
      + `<rect class="node" x="${round(left)}" y="${round(top)}" width="${width}"`
      + ` height="${height}" rx="7"/><rect x="${round(left + 5)}" y="${round(top + 5)}" width="8"`
      + ` height="8" rx="2" fill="var(--worker-${rank})"/>`
      + `<text class="name" x="${round(left + 17)}" y="${round(top + 13)}">${s.names[rank]}</text>`
      + shown.cells[rank].map((k, chunk) => bands(s.kinds[k], left + 4 + chunk * pitch + gap / 2,
        top + data.label, pitch - gap, height - data.label - 5,
        changed.has(`${rank},${chunk}`))).join("") + "</g>";
  }).join("");
}

const arrows = (s, messages, over, head) => messages.map((m) =>
  `<path class="arrow${over ? " over" : ""}" d="${m.path}" marker-end="url(#${head})"`
  + `${m.adds ? "" : ' stroke-dasharray="5 4"'}/>`).join("");

function message(s, m) {
  const tall = data.message_height, each = m.width / m.kinds.length;
  return `<g class="message"><rect class="box" x="${-m.width / 2 - 2}" y="${-tall / 2 - 2}"`
    + ` width="${m.width + 4}" height="${tall + 4}" rx="3"/>`
    + m.kinds.map((k, i) =>
      bands(s.kinds[k], -m.width / 2 + i * each, -tall / 2, each, tall, false)).join("")
    + (s.ranks <= 8 ? `<text class="label" y="${-tall / 2 - 5}">${m.label}</text>` : "") + "</g>";
}

function point([a, b, c, d, e, f], share) {
  const x = (1 - share) ** 2, y = 2 * share * (1 - share), z = share ** 2;
  return [x * a + y * c + z * e, x * b + y * d + z * f];
}

class Panel extends Steps {
  constructor(s, number) {
    super(s);
    const groups = s.groups.map((g) => `<polygon class="group" points="${g.join(" ")}"`
      + ` stroke-width="${s.size[1] + 14}"/>`).join("");
    const links = s.links.map(([a, b, c, d]) =>
      `<line class="link" x1="${a}" y1="${b}" x2="${c}" y2="${d}"/>`).join("");
    this.root.innerHTML = `<div>${data.scenes.length > 1 ? `<h2>${safe(s.name)}</h2>` : ""}<p class="soft">${safe(s.summary)}</p>
      <svg class="picture" role="img" viewBox="0 0 ${s.width} ${round(s.height)}"
        aria-label="${safe(s.name)}, ${s.ranks} ranks"><defs><marker id="head${number}"
        viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" orient="auto">
        <path class="head" d="M0 0L8 4L0 8z"/></marker></defs>${groups}${links}
        <g class="arrows"></g><g class="ranks"></g><g class="messages"></g></svg></div>
      <div>${step_buttons(s.name, s.steps.map((step) => step.phase))}
      <div class="rule"><p class="phase"></p><p class="words"></p></div>
      <ul class="sent"></ul>
      <details><summary>State as a table: whose contributions each chunk holds</summary>
      <div class="scroll"><table class="state"></table></div></details></div>`;
    this.head = `head${number}`;
    this.part = Object.fromEntries(["arrows", "ranks", "messages", "phase", "words", "sent", "state"]
      .map((name) => [name, this.root.querySelector(`.${name}`)]));
    this.listen();
    this.shown = "";
  }

  // the clock's position at which a step is complete
  when(step) { return clock === "rounds" ? step : seconds(this.s.loads.slice(0, step)); }

  draw(position) {
    const [step, share] = this.at(position), s = this.s, part = this.part;
    const moving = share > 0, now = moving ? step + 1 : step, shown = s.steps[now];
    if (this.shown !== `${step} ${moving}`) {
      this.shown = `${step} ${moving}`;
      part.arrows.innerHTML = arrows(s, shown.messages, !moving, this.head);
      part.ranks.innerHTML = ranks(s, step, !moving);
      part.messages.innerHTML = moving ? shown.messages.map((m) => message(s, m)).join("") : "";
      this.press(now);
      const name = data.scenes.length > 1 ? `${s.name}, ` : "";
      part.phase.textContent = now === 0 ? `${name}step 0: start`
        : `${name}step ${now} of ${this.last}: ${shown.phase}, r = ${shown.place}`;
      part.words.textContent = now === 0 ? "Every rank holds its own buffer, in its own colour."
        : s.rules[shown.phase];
      part.sent.innerHTML = shown.messages.map((m) => `<li>${safe(m.words)}</li>`).join("");
      part.state.innerHTML = `<tr><th>rank</th>${s.steps[0].cells[0].map((_, c) =>
        `<th>c${c}</th>`).join("")}</tr>` + s.steps[step].cells.map((row, rank) =>
        `<tr><td>${rank}</td>${row.map((k) => `<td${s.kinds[k].complete ? ' class="complete"' : ""}>`
          + `${s.kinds[k].text}</td>`).join("")}</tr>`).join("");
      this.root.dataset.step = step;
      this.root.dataset.moving = moving;
    }
    if (moving) [...part.messages.children].forEach((g, i) => {
      const [x, y] = point(shown.messages[i].curve, share);
      g.setAttribute("transform", `translate(${round(x)} ${round(y)})`);
    });
  }
}

// --- the clock

const rounds = where;
where = () => (clock === "seconds" ? `${time(position)} of ${time(end())}` : rounds());

function use(name) {
  const steps = panels.map((p) => p.at(position));
  before = null;
  stop();
  clock = name;
  for (const button of document.querySelectorAll("[data-clock]"))
    button.setAttribute("aria-pressed", String(button.dataset.clock === name));
  jump(Math.max(...panels.map((p, i) => p.when(steps[i][0]))));
}
for (const button of document.querySelectorAll("[data-clock]"))
  button.onclick = () => use(button.dataset.clock);
begin(data.scenes.map((s, number) => new Panel(s, number)));
$("clocks").hidden = panels.length < 2;
for (const what of ["latency", "bandwidth", "size"]) {
  $(what).max = data.choices[what].length - 1;
  $(what).value = chosen[what];
  $(what).oninput = () => {
    const share = end() ? position / end() : 0;
    chosen[what] = Number($(what).value);
    tabulate();
    ends(clock === "seconds" ? share * end() : position);
  };
}
if (panels.length === 1) panels[0].root.lastElementChild.append($("costs"));
tabulate();
use(clock);
start(position);
