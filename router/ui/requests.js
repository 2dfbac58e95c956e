// What one looks for when clients complain: requests under way, the slow ones and the last ones, and what each tenant uses. For operators.

import { getJson } from "./api.js";
import { clock, count, el, percent, plural, seconds, setText } from "./format.js";
import { segmentsOf } from "./phases.js";

const EVERY_MS = 2_000;
// As router/status/request_book.py names them, and the colour of each.
const PHASES = [
  { name: "route", label: "Route" },
  { name: "queue", label: "Queue" },
  { name: "prefill", label: "Prefill" },
  { name: "hand_over", label: "Hand-over", colour: "fetch" },
  { name: "decode", label: "Decode" },
];

/** {word, tone} of a request: how it ended, or how far it is. Pure. */
export function stateOf({ status, phases }) {
  if (status) return { word: status.toLowerCase().replaceAll("_", " "), tone: status === "OK" ? "ok" : status === "CANCELLED" ? "warn" : "bad" };
  const last = PHASES.findLast((phase) => phase.name in phases);
  return { word: !last || last.name === "route" ? "waiting" : last.name === "decode" ? "decoding" : "prefill", tone: "" };
}

/** Where its trace is shown; null: nowhere. Pure. */
export function traceUrl(template, traceId) {
  return /^https?:\/\//.test(template) && /^[0-9a-f]{32}$/.test(traceId) ? template.replace("{trace_id}", traceId) : null;
}

/** [{name, label, colour, s, share}], of those that took time. Pure. */
export function partsOf(phases) {
  const times = Object.fromEntries(Object.entries(phases).map(([name, s]) => [`${name}_s`, s]));
  return segmentsOf(times, PHASES.map((phase) => phase.name), PHASES).map((part) => ({ colour: part.name, ...part }));
}

/** The cells of a tenant's row. Pure. */
export function tenantCells(each, { max_inflight: running, max_waiting: waiting, keys }, totalTokens) {
  const of = (value, most) => (most ? `${value} of ${most}` : `${value}`);
  const key = keys[each.tenant];
  return [
    each.tenant || "(none)",
    of(each.running, running),
    of(each.waiting, waiting),
    count(each.tokens),
    percent(totalTokens > 0 ? each.tokens / totalTokens : null),
    percent(each.share),
    count(each.weight),
    key ? `${count(key.used)} of ${count(key.limit)}` : "no limit",
  ];
}

/** The way to the tokens: beside all of a long answer nothing of it could be seen. */
function bar(phases) {
  const { decode: _, ...way } = phases;
  const told = partsOf(phases).map((part) => `${part.label} ${seconds(part.s)}`).join(", ");
  return el(
    "div",
    { class: "stack thin", role: "img", "aria-label": told || "no time at all", title: told },
    ...partsOf(way).map((part) => {
      const piece = el("span", { class: `phase-${part.colour}` });
      piece.style.flexGrow = part.share;
      return piece;
    }),
  );
}

function name(each, template) {
  const url = traceUrl(template, each.trace_id);
  const text = el("code", { class: "id", text: each.request_id, title: each.request_id });
  return url ? el("a", { href: url, target: "_blank", rel: "noopener noreferrer" }, text) : text;
}

const workersOf = (each) => [each.prefill_worker, each.decode_worker].filter(Boolean).join(" → ") || "–";

/** Why KV was moved, or kept; and what was predicted then. Pure. */
export function whyOf({ why, predicted_ttft_s: predicted }) {
  return why && `${why}; a first token was predicted within ${seconds(predicted)}`;
}

// Title, its cell (a text or an element), and whether it is words.
const COLUMNS = [
  ["Began", (each) => clock(each.began_unix_s)],
  ["Request", (each, { trace_url: template }) => name(each, template), true],
  ["State", (each) => { const { word, tone } = stateOf(each); return el("span", { class: `pill ${tone}`, text: word }); }, true],
  ["Longest wait", (each) => el("b", { text: seconds(each.wait_s) })],
  ["First token", (each) => seconds(each.ttft_s)],
  ["Longest gap", (each) => (each.longest_gap_s ? seconds(each.longest_gap_s) : "–")],
  ["Until it decodes", (each) => bar(each.phases), true],
  ["In all", (each) => seconds(each.total_s)],
  ["Prompt", (each) => `${count(each.prompt_tokens)}${each.cached_tokens ? ` (${count(each.cached_tokens)} cached)` : ""}`],
  ["Answer", (each) => count(each.output_tokens)],
  ["Tenant", (each) => `${each.tenant || "–"}${each.request_class === "standard" ? "" : ` · ${each.request_class}`}`, true],
  ["Workers", (each) => el("span", { title: whyOf(each), text: `${workersOf(each)}${each.attempts > 1 ? ` · ${plural(each.attempts, "attempt")}` : ""}` }), true],
];

class Table {
  constructor(title, about, heads) {
    this.title = el("h3", { text: title });
    this.about = el("p", { class: "about", text: about });
    this.body = el("tbody");
    this.region = el(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": title },
      el(
        "table",
        {},
        el("caption", { class: "unseen", text: title }),
        el("thead", {}, el("tr", {}, ...heads.map(([text, words]) => el("th", { scope: "col", class: words && "words", text })))),
        this.body,
      ),
    );
    this.empty = el("p", { class: "hint", text: "None." });
    this.root = el("section", { class: "panel book" }, this.title, this.about, this.empty, this.region);
  }

  show(rows, heads) {
    this.empty.hidden = rows.length > 0;
    this.region.hidden = rows.length === 0;
    // Whoever is about to follow a link or to copy a name keeps it.
    const selected = getSelection();
    if (this.body.contains(document.activeElement) || (!selected.isCollapsed && this.body.contains(selected.anchorNode))) return;
    this.body.replaceChildren(
      ...rows.map((cells) => el("tr", {}, ...cells.map((cell, i) => el(i ? "td" : "th", { scope: i ? null : "row", class: heads[i][1] && "words" }, cell)))),
    );
  }
}

const REQUEST_HEADS = COLUMNS.map(([title, , words]) => [title, words]);
const TENANT_HEADS = ["Tenant", "Running", "Waiting", "Tokens/min", "Part of all", "Its share now", "Weight", "Keys' tokens/min"].map((title) => [title]);

export class RequestsView {
  #timer = 0;
  #asking = false;

  constructor() {
    this.problem = el("p", { class: "panel quiet", hidden: true });
    this.tables = {
      live: new Table("Under way", "Those that have been silent for longest come first.", REQUEST_HEADS),
      slowest: new Table("Slow", "Of those that ended in the last ten minutes, the ones that kept their clients waiting longest, batch requests aside.", REQUEST_HEADS),
      recent: new Table("Ended last", "", REQUEST_HEADS),
    };
    this.tenants = new Table("Tenants", "Tokens of prompts and answers in the last minute, through this router.", TENANT_HEADS);
    this.keys = el("ul", { class: "keys", "aria-hidden": "true" }, ...PHASES.slice(0, -1).map((phase) => el("li", {}, el("span", { class: `key phase-${phase.colour ?? phase.name}` }), phase.label)));
    const { live, slowest, recent } = this.tables;
    this.tablesBox = el("div", { class: "books" }, this.tenants.root, this.keys, live.root, slowest.root, recent.root);
    this.root = el(
      "section",
      { class: "requests", "aria-labelledby": "requests-title", hidden: true },
      el("h2", { id: "requests-title", class: "unseen", text: "Requests" }),
      this.problem,
      this.tablesBox,
    );
  }

  /** After it was shown or hidden: asks while it can be seen, and only then. */
  follow() {
    clearTimeout(this.#timer);
    if (this.root.hidden || this.#asking) return;
    this.#asking = true;
    const again = () => {
      this.#asking = false;
      clearTimeout(this.#timer);
      this.#timer = setTimeout(() => this.follow(), EVERY_MS);
    };
    if (document.hidden) return void again();
    getJson("ui/api/requests").then((told) => this.#show(told), (error) => this.#fail(error)).finally(again);
  }

  #fail(error) {
    setText(this.problem, error.message);
    this.problem.hidden = false;
    if (error.status === 401 || error.status === 403) this.tablesBox.hidden = true;
  }

  #show(told) {
    this.problem.hidden = true;
    this.tablesBox.hidden = false;
    setText(this.tables.live.title, `Under way · ${told.num_live}`);
    for (const [key, table] of Object.entries(this.tables)) {
      table.show(told[key].map((each) => COLUMNS.map(([, of]) => of(each, told))), REQUEST_HEADS);
    }
    setText(this.tenants.title, `Tenants · ${told.num_tenants}`);
    const total = told.tenants.reduce((sum, each) => sum + each.tokens, 0);
    this.tenants.show(told.tenants.map((each) => tenantCells(each, told, total)), TENANT_HEADS);
  }
}
