// The dashboard: figures of now, the map, and charts of the last minutes.

import { Alerts } from "./alerts.js";
import { TimeChart, sparkline } from "./charts.js";
import { bytesPerSecond, count, el, percent, perSecond, ratio, seconds, setText, span } from "./format.js";
import { ClusterMap, WorkerTable } from "./map.js";
import { ScalingLine } from "./scaling.js";
import { anyTraffic, lastOf, latest } from "./state.js";

const RANGES = [60, 300, 600];
const LINES = [
  { label: "p50", tone: "one", dash: "none" },
  { label: "p95", tone: "two", dash: "long" },
  { label: "p99", tone: "three", dash: "short" },
];
const percentiles = (name) => LINES.map((line) => ({ ...line, name: `${name}_s_${line.label}` }));

const CHARTS = [
  { title: "Time to first token", about: "from a request's arrival", series: percentiles("ttft"), format: seconds },
  { title: "Time per output token", about: "of answers that ended", series: percentiles("tpot"), format: seconds },
  { title: "Inter-token latency", about: "each gap between two tokens", series: percentiles("itl"), format: seconds },
  {
    title: "Tokens per second",
    about: "through this router",
    format: count,
    series: [
      { name: "prompt_tokens_per_s", label: "prompt", tone: "prefill", dash: "none" },
      { name: "cached_tokens_per_s", label: "cached", tone: "kv", dash: "long" },
      { name: "generation_tokens_per_s", label: "output", tone: "decode", dash: "none" },
    ],
  },
  {
    title: "Requests",
    about: "at this router",
    format: count,
    least: 4,
    series: [
      { name: "num_running", label: "running", tone: "decode", dash: "none" },
      { name: "num_waiting", label: "waiting", tone: "two", dash: "long" },
      { name: "failures_per_s", label: "failures/s", tone: "bad", dash: "short" },
    ],
  },
  {
    title: "Prefix cache hit rate",
    about: "of tokens looked up, all workers",
    format: percent,
    top: 1,
    area: true,
    series: [{ name: "hit_rate", label: "hit rate", tone: "kv", dash: "none" }],
  },
  {
    title: "KV hand-over",
    about: "taken from other workers",
    format: bytesPerSecond,
    area: true,
    series: [{ name: "fetched_bytes_per_s", label: "rate", tone: "kv", dash: "none" }],
  },
  {
    title: "P : D balance",
    about: "prompts : answers, work per worker for it",
    format: ratio,
    scale: "balance",
    series: [{ name: "prefill_decode_load_ratio", label: "load", tone: "one", dash: "none" }],
  },
  {
    title: "KV blocks in use",
    about: "of all workers of a role",
    format: percent,
    top: 1,
    series: [
      { name: "prefill_kv_usage", label: "prefill", tone: "prefill", dash: "none" },
      { name: "decode_kv_usage", label: "decode", tone: "decode", dash: "long" },
    ],
  },
  { title: "Queue time", about: "until a worker computes the prompt", series: percentiles("queue"), format: seconds },
  {
    title: "Kept and moved",
    about: "requests per second",
    format: count,
    series: [
      { name: "handed_over_per_s", label: "moved", tone: "kv", dash: "none" },
      { name: "local_per_s", label: "kept", tone: "decode", dash: "none" },
      { name: "local_on_prefill_per_s", label: "kept, prefill workers", tone: "prefill", dash: "long" },
    ],
  },
  {
    title: "Targets kept",
    about: "of the requests that had some",
    format: percent,
    top: 1,
    area: true,
    series: [{ name: "slo_attainment", label: "kept", tone: "one", dash: "none" }],
  },
];

const TILES = [
  { label: "Requests", of: (s) => perSecond(latest(s, "requests_per_s")), spark: "requests_per_s", tone: "decode" },
  { label: "Output tokens", of: (s) => perSecond(latest(s, "generation_tokens_per_s")), spark: "generation_tokens_per_s", tone: "decode" },
  { label: "TTFT p50", of: (s) => seconds(latest(s, "ttft_s_p50")), more: (s) => `p99 ${seconds(latest(s, "ttft_s_p99"))}`, spark: "ttft_s_p50", tone: "one" },
  { label: "TPOT p50", of: (s) => seconds(latest(s, "tpot_s_p50")), more: (s) => `p99 ${seconds(latest(s, "tpot_s_p99"))}`, spark: "tpot_s_p50", tone: "one" },
  { label: "Prefix hits", of: (s) => percent(latest(s, "hit_rate")), spark: "hit_rate", tone: "kv", top: 1 },
  { label: "KV hand-over", of: (s) => bytesPerSecond(latest(s, "fetched_bytes_per_s")), spark: "fetched_bytes_per_s", tone: "kv" },
  {
    label: "Targets kept",
    of: (s) => percent(s.status?.load.slo_attainment),
    more: (s) => (s.status?.load.slo_attainment === undefined ? "none were given" : "of the last minute's"),
    spark: "slo_attainment",
    tone: "one",
    top: 1,
  },
  {
    label: "Queue",
    of: (s) => count(latest(s, "num_waiting")),
    more: (s) => `waited ${seconds(latest(s, "queue_s_p95"))} (p95)`,
    spark: "num_waiting",
    tone: "two",
  },
];

export class Dashboard {
  constructor() {
    this.rangeS = 300;
    this.paused = false;
    this.alerts = new Alerts();
    this.map = new ClusterMap();
    this.scaling = new ScalingLine();
    this.table = new WorkerTable();
    this.table.root.addEventListener("toggle", () => this.#state && this.table.update(this.#state));
    this.charts = CHARTS.map((chart) => new TimeChart(chart));
    this.tiles = TILES.map((tile) => {
      const value = el("span", { class: "figure" });
      const more = el("span", { class: "more" });
      const spark = el("span", { class: "sparkbox" });
      return { ...tile, value, extra: more, spot: spark, root: el("div", { class: "tile panel" }, el("dt", { text: tile.label }), el("dd", {}, el("span", { class: "values" }, value, more), spark)) };
    });
    this.quiet = el(
      "p",
      { class: "quiet panel", hidden: true },
      "No requests have come lately. ",
      el("a", { href: "#playground", text: "Ask something in the playground" }),
      ", and this page fills.",
    );
    this.pause = el("button", { type: "button", class: "plain", "aria-pressed": "false", text: "Pause", onclick: () => this.#togglePause() });
    const ranges = RANGES.map((range) =>
      el(
        "label",
        {},
        el("input", { type: "radio", name: "range", value: range, checked: range === this.rangeS, onchange: () => this.#setRange(range) }),
        el("span", { text: span(range) }),
      ),
    );
    this.root = el(
      "section",
      { class: "dashboard", "aria-labelledby": "dashboard-title" },
      el("h2", { id: "dashboard-title", class: "unseen", text: "Dashboard" }),
      this.alerts.root,
      el("dl", { class: "tiles" }, ...this.tiles.map((tile) => tile.root)),
      this.quiet,
      el("section", { class: "panel mapbox", "aria-label": "Workers" }, this.map.root, this.scaling.root),
      this.table.root,
      el(
        "div",
        { class: "bar-above" },
        el("h2", { text: "The last minutes" }),
        el("fieldset", { class: "segments" }, el("legend", { class: "unseen", text: "How far back charts reach" }), ...ranges),
        this.pause,
      ),
      el("div", { class: "charts" }, ...this.charts.map((chart) => chart.root)),
    );
  }

  #state = null;

  update(state) {
    this.#state = state;
    if (this.paused || this.root.hidden) return;
    this.#show();
  }

  /** After it was hidden. */
  show() {
    if (this.#state) this.#show();
  }

  #show() {
    const state = this.#state;
    for (const tile of this.tiles) {
      setText(tile.value, tile.of(state));
      setText(tile.extra, tile.more?.(state) ?? "");
      tile.spot.replaceChildren(sparkline(lastOf(state, tile.spark, 120), { tone: tile.tone, top: tile.top }));
    }
    this.quiet.hidden = !state.status || state.workers.size === 0 || anyTraffic(state, this.rangeS);
    this.alerts.update(state);
    this.map.update(state);
    this.scaling.update(state);
    this.table.update(state);
    for (const chart of this.charts) chart.update(state, this.rangeS);
  }

  #setRange(range) {
    this.rangeS = range;
    if (this.#state) this.#show();
  }

  #togglePause() {
    this.paused = !this.paused;
    this.pause.setAttribute("aria-pressed", String(this.paused));
    setText(this.pause, this.paused ? "Resume" : "Pause");
    this.root.classList.toggle("paused", this.paused);
    if (!this.paused) this.show();
  }
}
