// A chart of memory by owner over time: stacked areas, drawn as SVG.

import { element, svg } from "./dom.js";
import { age, bytes, nameOf, time, unitOf } from "./text.js";

const HEIGHT = 220;
const LEAST_MS = 60 * 1000;
const MARGIN = { left: 68, right: 12, top: 10, bottom: 26 };

export class Chart {
  #figure;
  #title;
  #owners;
  #caption = element("span", { class: "at" });
  #readout = element("p", { class: "unseen", role: "status" });
  #legend = element("ul", { class: "legend" });
  #drawing = svg("svg", { role: "img", tabindex: "0" });
  #entries = [];
  #now = 0;
  #window = 1;
  #cursor = null; // the time whose values the legend shows; null for the present

  /** `owners` are drawn from the bottom to the top. */
  constructor(figure, title, owners) {
    this.#figure = figure;
    this.#title = title;
    this.#owners = owners;
    const caption = element("figcaption", {}, element("strong", {}, title), " ", this.#caption);
    figure.append(caption, this.#drawing, this.#legend, this.#readout);
    this.#drawing.addEventListener("pointermove", (event) => this.#point(event));
    this.#drawing.addEventListener("pointerleave", () => this.#look(null));
    this.#drawing.addEventListener("keydown", (event) => this.#press(event));
    this.#drawing.addEventListener("blur", () => this.#look(null));
    new ResizeObserver(() => this.#draw()).observe(figure);
  }

  /** Times are milliseconds since 1970. `longest`: how much time the chart shows, if so much is known. */
  draw(entries, now, longest) {
    this.#entries = entries.filter((entry) => entry.to >= now - longest);
    this.#now = now;
    this.#window = Math.min(longest, Math.max(LEAST_MS, now - (this.#entries[0]?.from ?? now)));
    if (this.#cursor !== null && this.#cursor < now - this.#window) this.#cursor = null;
    this.#draw();
  }

  get #width() {
    return Math.max(this.#figure.clientWidth, 280);
  }

  #x(at) {
    const inner = this.#width - MARGIN.left - MARGIN.right;
    return MARGIN.left + Math.max(0, 1 - (this.#now - at) / this.#window) * inner;
  }

  #entryAt(at) {
    return this.#entries.findLast((entry) => entry.from <= at && at <= entry.to);
  }

  #draw() {
    const width = this.#width;
    const most = Math.max(1, ...this.#entries.map((entry) => this.#total(entry)));
    const power = unitOf(most);
    const step = niceStep(most / 1024 ** power / 4) * 1024 ** power;
    const top = Math.ceil(most / step) * step;
    const y = (value) => HEIGHT - MARGIN.bottom - (value / top) * (HEIGHT - MARGIN.top - MARGIN.bottom);
    const parts = [];
    for (let value = 0; value <= top; value += step) {
      parts.push(svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value) }));
      parts.push(label(MARGIN.left - 8, y(value) + 4, "end", bytes(value, power)));
    }
    const marks = width < 480 ? 2 : 4;
    for (let mark = 0; mark <= marks; mark += 1) {
      const ago = (this.#window * mark) / marks;
      const anchor = mark === 0 ? "end" : mark === marks ? "start" : "middle";
      parts.push(label(this.#x(this.#now - ago), HEIGHT - 6, anchor, mark === 0 ? "now" : `${age(ago)} ago`));
    }
    this.#owners.forEach((owner, index) => {
      const below = this.#owners.slice(0, index);
      const area = this.#entries.map((entry) => this.#block(entry, owner, below, y)).join("");
      parts.push(svg("path", { class: `area owner-${owner}`, d: area }));
    });
    if (this.#cursor !== null) {
      const x = this.#x(this.#cursor);
      parts.push(svg("line", { class: "cursor", x1: x, x2: x, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }));
    }
    this.#drawing.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.#drawing.setAttribute("height", HEIGHT);
    this.#drawing.replaceChildren(...parts);
    this.#tell();
  }

  #total(entry) {
    return this.#owners.reduce((total, owner) => total + (entry.values[owner] ?? 0), 0);
  }

  /** A rectangle; a line of the background stays between it and the next one above. */
  #block(entry, owner, below, y) {
    const value = entry.values[owner] ?? 0;
    if (value === 0) return "";
    const base = below.reduce((total, other) => total + (entry.values[other] ?? 0), 0);
    const left = this.#x(entry.from);
    const right = Math.max(this.#x(entry.to), left + 1);
    const height = Math.max(y(base) - y(base + value) - 1, 1);
    return `M${left.toFixed(1)} ${y(base).toFixed(1)}H${right.toFixed(1)}v${(-height).toFixed(1)}H${left.toFixed(1)}z`;
  }

  /** The legend has the values, so that nobody needs the colours. */
  #tell() {
    const at = this.#cursor ?? this.#now;
    const entry = this.#entryAt(at);
    const when = this.#cursor === null ? "now" : `at ${time(at)}, ${age(this.#now - at)} ago`;
    const total = entry === undefined ? "the engine did not answer" : bytes(this.#total(entry));
    const values = this.#owners.map((owner) => [owner, entry === undefined ? "?" : bytes(entry.values[owner] ?? 0)]);
    this.#caption.textContent = `${when}: ${total}`;
    this.#legend.replaceChildren(...values.map(([owner, value]) =>
      element("li", {}, element("span", { class: `swatch owner-${owner}` }), `${nameOf(owner)} `, element("b", {}, value))));
    const spoken = values.map(([owner, value]) => `${nameOf(owner)} ${value}`).join(", ");
    this.#drawing.setAttribute("aria-label", `${this.#title}, last ${age(this.#window)}. ${when}: ${total}: ${spoken}. `
      + "The arrow keys go through the changes.");
    return `${when}: ${total}: ${spoken}`;
  }

  #look(at) {
    if (this.#cursor === at) return "";
    this.#cursor = at;
    this.#draw();
    return this.#tell();
  }

  #point(event) {
    const inner = this.#width - MARGIN.left - MARGIN.right;
    const x = event.clientX - this.#drawing.getBoundingClientRect().left - MARGIN.left;
    this.#look(this.#now - (1 - Math.min(Math.max(x / inner, 0), 1)) * this.#window);
  }

  #press(event) {
    const times = this.#entries.map((entry) => Math.max(entry.from, this.#now - this.#window));
    const here = this.#cursor ?? this.#now;
    let at;
    if (event.key === "ArrowLeft") at = times.findLast((one) => one < here) ?? times[0];
    else if (event.key === "ArrowRight") at = times.find((one) => one > here) ?? null;
    else if (event.key === "Escape") at = null;
    else return;
    event.preventDefault();
    this.#readout.textContent = this.#look(at ?? null);
  }
}

function label(x, y, anchor, text) {
  const node = svg("text", { x, y, "text-anchor": anchor });
  node.textContent = text;
  return node;
}

/** The least of 1, 2 and 5 times a power of ten that is not below `least`. */
function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least);
}
