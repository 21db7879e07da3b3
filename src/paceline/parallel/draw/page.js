// The page of timetables and split models. Python has drawn every item; this script shows, hides
// and moves them. An item: [SVG, start, end, until, ghost, slide, name], as in scene.py.
let followed = false; // whether a person has moved the clock

class Panel extends Steps {
  constructor(s) {
    super(s);
    this.root.dataset.name = s.name;
    const [wide, high] = s.size, [side, left] = s.side;
    const svg = (width, inner, more) => `<svg class="${more}" viewBox="0 0 ${width} ${high}"
      width="${width}" height="${high}" ${more === "side" ? 'aria-hidden="true"'
    : `role="img" aria-label="${safe(s.title)}"`}>${inner}</svg>`;
    const cursor = s.cursor ? `<line class="cursor" y1="0" y2="${high}"/>` : "";
    this.root.innerHTML = `${data.scenes.length > 1 ? `<h2>${safe(s.title)}</h2>` : ""}
      <p class="soft">${safe(s.summary)}</p>
      ${s.legend[0] ? `<svg class="legend" viewBox="0 0 ${round(s.legend[0])} 24"
        width="${round(s.legend[0])}">${s.legend[1]}</svg>` : ""}
      <div class="stage${s.cursor ? " timeline" : ""}">${side ? svg(side, left, "side") : ""}
      <div class="scroll">${svg(wide, `<defs><marker id="head" viewBox="0 0 8 8" refX="6" refY="4"
        markerWidth="7" markerHeight="7" orient="auto"><path class="head" d="M0 0L8 4L0 8z"/></marker>
        </defs>${s.items.map(([body, , , , , , name]) =>
    `<g class="item" data-name="${safe(name)}">${body}</g>`).join("")}${cursor}`, "drawing")}</div>
      </div><div class="said">${s.cursor ? "" : step_buttons(s.name, s.steps.map((step) => step[5]))}
      <p class="phase"></p><p class="words"></p><ul class="sent"></ul>
      <div class="scroll"><table class="state"></table></div></div>`;
    this.items = [...this.root.querySelectorAll(".item")];
    this.cursor = this.root.querySelector(".cursor");
    this.scroll = this.root.querySelector(".scroll");
    this.part = Object.fromEntries(["phase", "words", "sent", "state"]
      .map((name) => [name, this.root.querySelector(`.${name}`)]));
    this.listen();
    this.shown = null;
  }

  // keep the cursor in sight; the longest panel moves the others
  follow(x) {
    if (!followed || panels.some((p) => p.s.steps.at(-1)[0] > this.s.steps.at(-1)[0])) return;
    const room = this.scroll.clientWidth, at = this.scroll.scrollLeft;
    if (x < at + 30 || x > at + room - 30)
      for (const panel of panels) panel.scroll.scrollLeft = x - (playing ? 60 : room - 60);
  }

  when(step) { return this.s.steps[step][0]; }

  draw(position) {
    const s = this.s, near = 1e-9;
    s.items.forEach(([, start, end, until, ghost, slide], i) => {
      const later = position <= start + near;
      const gone = until !== null && position > until + near;
      const now = !later && end !== null && position <= end + near;
      const state = later ? (ghost ? "later" : "hidden") : gone ? "hidden" : now ? "now" : "";
      const item = this.items[i];
      if (item.dataset.state !== state) item.dataset.state = state;
      if (slide) {
        const left = now ? (end - position) / (end - start) : 0;
        item.setAttribute("transform", `translate(${round(left * slide)} 0)`);
      }
    });
    if (this.cursor) {
      const [from, each] = s.cursor, x = from + each * Math.min(position, s.steps.at(-1)[0]);
      this.cursor.setAttribute("x1", round(x));
      this.cursor.setAttribute("x2", round(x));
      this.follow(x * (this.scroll.scrollWidth / s.size[0]));
    }
    const [step, share] = this.at(position), now = share > 0 ? step + 1 : step;
    if (this.shown === now) return;
    this.shown = now;
    const [, phase, words, sent, state] = s.steps[now];
    this.press(now);
    this.part.phase.textContent = phase;
    this.part.words.textContent = words;
    this.part.sent.innerHTML = sent.map((line) => `<li>${safe(line)}</li>`).join("");
    this.part.state.innerHTML = state.map((row, i) =>
      `<tr>${row.map((cell) => (i ? `<td>${safe(cell)}</td>` : `<th>${safe(cell)}</th>`)).join("")}</tr>`
    ).join("");
    this.root.dataset.step = now;
  }
}

if (data.unit !== "step")
  where = () => `${data.unit} ${round(position)} of ${round(end())}`;
begin(data.scenes.map((s) => new Panel(s)));
start(data.begin === "end" ? end() : 0);
followed = true;
for (const one of panels)
  one.scroll.addEventListener("scroll", () => {
    for (const other of panels) other.scroll.scrollLeft = one.scroll.scrollLeft;
  });
