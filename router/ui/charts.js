// A chart over time: lines in SVG, a cursor for mouse and keyboard, and the same as a table.

import { ago, clock, el, setText, span, svg } from "./format.js";
import { areaOf, balance, linear, pathOf, summaryOf } from "./scale.js";
import { lastOf } from "./state.js";

const HEIGHT = 132;
const PAD = { left: 60, right: 8, top: 8, bottom: 20 };
const TABLE_ROWS = 12;

export class TimeChart {
  #cursor = null;
  #shown = null;

  /** series: [{name, label, tone, dash}] of columns of the history; `format` of their values; `top` of the axis if it is fixed; `area`: filled. */
  constructor({ title, about, series, format, top, area = false, scale = "linear", least = 0 }) {
    Object.assign(this, { title, series, format, top, area, scale, least });
    this.values = series.map(() => el("span", { class: "value" }));
    const legend = el(
      "ul",
      { class: "legend" },
      ...series.map((one, i) =>
        el("li", { class: `tone-${one.tone}` }, el("span", { class: `mark dash-${one.dash ?? "none"}`, "aria-hidden": "true" }), one.label, " ", this.values[i]),
      ),
    );
    this.svg = svg("svg", { class: "lines", "aria-hidden": "true", height: HEIGHT });
    this.tip = el("div", { class: "tip", hidden: true, "aria-hidden": "true" });
    this.empty = el("p", { class: "nothing", text: "nothing to show yet" });
    this.plot = el(
      "div",
      {
        class: "plot",
        tabindex: "0",
        role: "group",
        "aria-roledescription": "chart",
        onpointermove: (event) => this.#point(event),
        onpointerleave: () => this.#moveTo(null),
        onblur: () => this.#moveTo(null),
        onkeydown: (event) => this.#key(event),
      },
      this.svg,
      this.empty,
      this.tip,
    );
    this.said = el("p", { class: "unseen", "aria-live": "polite" });
    this.body = el("tbody");
    this.details = el(
      "details",
      { class: "as-table", ontoggle: () => this.#fillTable() },
      el("summary", {}, "Table", el("span", { class: "unseen", text: ` of ${title}` })),
      el(
        "div",
        { class: "scroll", tabindex: "0", role: "region", "aria-label": `${title}, as a table` },
        el(
          "table",
          {},
          el("caption", { class: "unseen", text: title }),
          el("thead", {}, el("tr", {}, el("th", { scope: "col", text: "Time" }), ...series.map((one) => el("th", { scope: "col", text: one.label })))),
          this.body,
        ),
      ),
    );
    this.root = el(
      "figure",
      { class: "chart panel" },
      el("figcaption", {}, el("h3", { text: title }), el("p", { class: "about", text: about }), legend),
      this.plot,
      this.said,
      this.details,
    );
    new ResizeObserver(() => this.#draw()).observe(this.plot);
  }

  update(state, rangeS) {
    this.#shown = {
      rangeS,
      everyS: state.everyS,
      times: lastOf(state, "unix_s", rangeS),
      columns: this.series.map((one) => lastOf(state, one.name, rangeS)),
    };
    const summaries = this.#shown.columns.map(summaryOf);
    this.#shown.columns.forEach((values, i) => setText(this.values[i], this.format(values.at(-1))));
    const known = summaries.some(Boolean);
    this.empty.hidden = known;
    const told = this.series.map((one, i) =>
      summaries[i]
        ? `${one.label} ${this.format(this.#shown.columns[i].at(-1))}, between ${this.format(summaries[i].least)} and ${this.format(summaries[i].most)}`
        : `${one.label} unknown`,
    );
    this.plot.setAttribute("aria-label", `${this.title}, the last ${span(rangeS)}. ${told.join("; ")}. Arrow keys read values.`);
    this.#draw();
    if (this.details.open && !this.details.contains(document.activeElement)) this.#fillTable();
  }

  // ---- drawing -----------------------------------------------------------------------------------------------------

  #frame() {
    const width = Math.max(120, this.plot.clientWidth);
    const { rangeS, everyS, times, columns } = this.#shown;
    const slots = Math.max(1, Math.ceil(rangeS / everyS) - 1);
    const offset = slots + 1 - times.length;
    const known = columns.flat().filter((value) => value !== null && value !== undefined);
    const scale = this.scale === "balance" ? balance() : linear({ most: Math.max(this.least, ...known, 0), top: this.top });
    const inner = { width: width - PAD.left - PAD.right, height: HEIGHT - PAD.top - PAD.bottom };
    return {
      width,
      scale,
      offset,
      slots,
      x: (i) => PAD.left + ((i + offset) / slots) * inner.width,
      y: (value) => PAD.top + (1 - scale.of(value)) * inner.height,
    };
  }

  #draw() {
    if (!this.#shown || !this.plot.clientWidth) return;
    const { width, scale, x, y } = this.#frame();
    const { rangeS, columns } = this.#shown;
    const floor = HEIGHT - PAD.bottom;
    const parts = [];
    for (const tick of scale.ticks) {
      const at = Math.round(y(tick)) + 0.5;
      parts.push(svg("line", { class: tick === 1 && this.scale === "balance" ? "grid even" : "grid", x1: PAD.left, x2: width - PAD.right, y1: at, y2: at }));
      parts.push(svg("text", { class: "tick", x: PAD.left - 6, y: at + 3.5, "text-anchor": "end", text: this.format(tick) }));
    }
    for (const [share, anchor] of [[0, "start"], [0.5, "middle"], [1, "end"]]) {
      const before = (1 - share) * rangeS;
      const at = PAD.left + share * (width - PAD.left - PAD.right);
      parts.push(svg("text", { class: "tick", x: at, y: HEIGHT - 5, "text-anchor": anchor, text: before ? ago(before) : "now" }));
    }
    columns.forEach((values, i) => {
      const { tone, dash } = this.series[i];
      if (this.area) parts.push(svg("path", { class: `area tone-${tone}`, d: areaOf(values, x, y, floor) }));
      parts.push(svg("path", { class: `line tone-${tone} dash-${dash ?? "none"}`, d: pathOf(values, x, y) }));
    });
    this.svg.setAttribute("width", width);
    this.svg.replaceChildren(...parts);
    this.#drawCursor();
  }

  #drawCursor() {
    this.svg.querySelector(".cursor")?.remove();
    const { times, columns } = this.#shown;
    const index = this.#cursor === null ? null : times.length - 1 - this.#cursor;
    this.tip.hidden = index === null || index < 0 || index >= times.length;
    if (this.tip.hidden) return;
    const { x, y, width } = this.#frame();
    const at = x(index);
    const group = svg("g", { class: "cursor" }, svg("line", { x1: at, x2: at, y1: PAD.top, y2: HEIGHT - PAD.bottom }));
    columns.forEach((values, i) => {
      const value = values[index];
      if (value !== null && value !== undefined) group.append(svg("circle", { class: `tone-${this.series[i].tone}`, cx: at, cy: y(value), r: 3 }));
    });
    this.svg.append(group);
    this.tip.replaceChildren(
      el("strong", { text: clock(times[index]) }),
      ...this.series.map((one, i) => el("span", { class: `tone-${one.tone}` }, `${one.label} `, el("b", { text: this.format(columns[i][index]) }))),
    );
    const left = at > width / 2;
    this.tip.style.left = left ? "" : `${at + 10}px`;
    this.tip.style.right = left ? `${width - at + 10}px` : "";
  }

  // ---- the cursor --------------------------------------------------------------------------------------------------

  #point(event) {
    if (!this.#shown?.times.length) return;
    const { offset, slots, width } = this.#frame();
    const inner = width - PAD.left - PAD.right;
    const share = (event.clientX - this.plot.getBoundingClientRect().left - PAD.left) / inner;
    const index = Math.round(share * slots) - offset;
    this.#moveTo(index >= 0 && index < this.#shown.times.length ? this.#shown.times.length - 1 - index : null);
  }

  #key(event) {
    const last = (this.#shown?.times.length ?? 0) - 1;
    if (last < 0) return;
    const before = this.#cursor ?? -1;
    const stride = event.shiftKey ? 10 : 1;
    const to = { ArrowLeft: before + stride, ArrowRight: before - stride, Home: last, End: 0, Escape: null }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.#moveTo(to === null ? null : Math.min(last, Math.max(0, to)));
    if (this.#cursor === null) return;
    const { times, columns } = this.#shown;
    const index = times.length - 1 - this.#cursor;
    setText(this.said, `${clock(times[index])}: ${this.series.map((one, i) => `${one.label} ${this.format(columns[i][index])}`).join(", ")}`);
  }

  /** So many seconds back; null: nowhere. */
  #moveTo(cursor) {
    if (cursor === this.#cursor) return;
    this.#cursor = cursor;
    if (this.#shown) this.#drawCursor();
  }

  #fillTable() {
    if (!this.details.open || !this.#shown) return;
    const { times, columns } = this.#shown;
    const stride = Math.max(1, Math.ceil(times.length / TABLE_ROWS));
    const rows = [];
    for (let i = times.length - 1; i >= 0; i -= stride) {
      rows.push(el("tr", {}, el("th", { scope: "row", text: clock(times[i]) }), ...columns.map((values) => el("td", { text: this.format(values[i]) }))));
    }
    this.body.replaceChildren(...rows);
  }
}

/** A line without axes. */
export function sparkline(values, { tone, width = 96, height = 24, top }) {
  const most = Math.max(top ?? 0, ...values.map((value) => value ?? 0), 1e-9);
  const x = (i) => (values.length > 1 ? (i / (values.length - 1)) * width : width);
  const y = (value) => height - 1.5 - (value / most) * (height - 3);
  return svg(
    "svg",
    { class: "spark", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("path", { class: `area tone-${tone}`, d: areaOf(values, x, y, height) }),
    svg("path", { class: `line tone-${tone}`, d: pathOf(values, x, y) }),
  );
}
