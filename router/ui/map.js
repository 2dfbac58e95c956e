// The deployment as a map: workers for prefill on the left, the router and the hand-overs between them, workers for decode on the right. What
// flows between them moves along lines, wider and faster the more it is. The cards are a list for who does not see the lines.

import { sparkline } from "./charts.js";
import { bytesPerSecond, count, el, percent, perSecond, plural, ratio, seconds, setText, svg } from "./format.js";
import { balance } from "./scale.js";
import { conditionOf, gpuWords, hitRate, kvUsage, latest, workersOf } from "./state.js";

const SIDES = { prefill: "Prefill", decode: "Decode" };
// A line is full at so much a second.
const FULL = { prompts: 50_000, tokens: 20_000, kv: 20e9 };

export class ClusterMap {
  #flows = [];
  #cards = new Map();

  constructor() {
    this.svg = svg("svg", { class: "flows", "aria-hidden": "true" });
    this.lists = {};
    this.heads = {};
    const side = (role) => {
      this.heads[role] = el("h3", { id: `map-${role}` });
      this.lists[role] = el("ul", { class: "workers", "aria-labelledby": `map-${role}` });
      return el("div", { class: `side ${role}` }, this.heads[role], this.lists[role]);
    };
    this.router = meters("Router", ["running", "waiting", "requests", "kept", "moved", "prompts to do", "answers to do"]);
    this.router.root.classList.add("router");
    this.kv = meters("KV cache", ["hand-over", "prefix hits"]);
    this.kv.root.classList.add("kv");
    this.balance = new Balance();
    this.router.root.append(this.balance.root);
    this.nobody = el(
      "p",
      { class: "nobody", hidden: true },
      "No workers have registered. Start some with ",
      el("code", { text: "twostep up" }),
      ", or see that they have the router's ",
      el("code", { text: "--redis-url" }),
      ", ",
      el("code", { text: "--model" }),
      " and ",
      el("code", { text: "--secret-file" }),
      ": the router's log says why it refuses one.",
    );
    this.root = el(
      "div",
      { class: "map" },
      this.svg,
      side("prefill"),
      el("div", { class: "middle" }, this.router.root, this.kv.root),
      side("decode"),
      this.nobody,
    );
    new ResizeObserver(() => this.#route()).observe(this.root);
  }

  update(state) {
    const { status } = state;
    if (!status) return;
    const load = status.load;
    for (const role of Object.keys(SIDES)) this.#list(state, role);
    this.nobody.hidden = state.workers.size > 0;
    this.router.set("running", count(load.num_running));
    this.router.set("waiting", count(load.num_waiting), load.num_waiting > 0 ? "warn" : "");
    const rate = (name) => latest(state, name) ?? load[name];
    this.router.set("requests", perSecond(rate("requests_per_s")));
    const placed = rate("local_per_s") + rate("handed_over_per_s");
    for (const [label, name] of [["kept", "local_per_s"], ["moved", "handed_over_per_s"]]) {
      this.router.set(label, placed > 0 ? `${percent(rate(name) / placed)} · ${perSecond(rate(name))}` : perSecond(0));
    }
    this.router.set("prompts to do", seconds(load.prompt_work_s));
    this.router.set("answers to do", seconds(load.answer_work_s));
    this.balance.set(load.prefill_decode_load_ratio);
    const live = [...state.workers.values()].filter((worker) => !worker.gone);
    const sum = (name) => live.reduce((total, worker) => total + worker[name], 0);
    const queried = sum("queried_tokens_per_s");
    this.kv.set("hand-over", bytesPerSecond(sum("fetched_bytes_per_s")));
    this.kv.set("prefix hits", queried > 0 ? percent(sum("hit_tokens_per_s") / queried) : "–");
    this.#route(state);
  }

  // ---- cards ---------------------------------------------------------------------------------------------------------

  #list(state, role) {
    const workers = workersOf(state, role);
    const gone = workers.filter((worker) => worker.gone).length;
    setText(this.heads[role], `${SIDES[role]} · ${plural(workers.length - gone, "worker")}`);
    this.lists[role].classList.toggle("many", workers.length > 6);
    const cards = workers.map((worker) => {
      const key = `${role}/${worker.worker_id}`;
      if (!this.#cards.has(key)) this.#cards.set(key, new WorkerCard(role));
      const card = this.#cards.get(key);
      card.update(worker);
      return card.root;
    });
    for (const key of this.#cards.keys()) {
      if (key.startsWith(`${role}/`) && !workers.some((worker) => key === `${role}/${worker.worker_id}`)) this.#cards.delete(key);
    }
    const list = this.lists[role];
    if (cards.length !== list.children.length || cards.some((card, i) => list.children[i] !== card)) list.replaceChildren(...cards);
  }

  // ---- lines ---------------------------------------------------------------------------------------------------------

  #route(state) {
    if (state) this.#flows = flowsOf(state);
    const box = this.root.getBoundingClientRect();
    if (!box.width) return;
    // One below the other there is nothing between them.
    const beside = getComputedStyle(this.root).gridTemplateColumns.split(" ").length > 1;
    const known = new Map([...this.svg.children].map((line) => [line.dataset.key, line]));
    const kept = new Set();
    for (const flow of beside ? this.#flows : []) {
      const from = this.#port(flow.from, flow.kind, flow.to, box);
      const to = this.#port(flow.to, flow.kind, flow.from, box);
      if (!from || !to) continue;
      kept.add(flow.key);
      let line = known.get(flow.key);
      if (!line) {
        line = svg("g", { "data-key": flow.key, class: `flow ${flow.kind}` }, svg("path", { class: "bed" }), svg("path", { class: "run" }));
        this.svg.append(line);
      }
      const bend = (to.x - from.x) / 2;
      const path = `M${from.x} ${from.y}C${from.x + bend} ${from.y} ${to.x - bend} ${to.y} ${to.x} ${to.y}`;
      const share = Math.min(1, Math.log1p((flow.rate / FULL[flow.kind]) * 100) / Math.log1p(100));
      line.classList.toggle("still", !(flow.rate > 0));
      for (const part of line.children) {
        if (part.getAttribute("d") !== path) part.setAttribute("d", path);
      }
      line.style.setProperty("--width", `${(1.5 + share * 5).toFixed(1)}px`);
      // In steps: a new duration makes the dashes jump.
      line.style.setProperty("--lap", `${[2.4, 1.6, 1.1, 0.7][Math.min(3, Math.floor(share * 4))]}s`);
    }
    for (const [key, line] of known) if (!kept.has(key)) line.remove();
    this.svg.setAttribute("width", box.width);
    this.svg.setAttribute("height", box.height);
  }

  #port(name, kind, other, box) {
    const node = name === "router" ? this.router.root : name === "kv" ? this.kv.root : this.#cards.get(name)?.root;
    if (!node?.isConnected) return null;
    const at = node.getBoundingClientRect();
    const onLeft = name.startsWith("decode/") || other.startsWith("prefill/");
    const share = name === "router" ? { prompts: 0.3, tokens: 0.4 }[kind] : name === "kv" ? 0.5 : { prompts: 0.2, tokens: 0.42, kv: 0.75 }[kind];
    return { x: Math.round((onLeft ? at.left : at.right) - box.left), y: Math.round(at.top + at.height * share - box.top) };
  }
}

/** Prompts to the workers, KV between them, tokens back to the router. What a worker is for has a line always, the rest as long as it flows. */
export function flowsOf(state) {
  const live = ["prefill", "decode"].flatMap((role) => workersOf(state, role)).filter((worker) => !worker.gone);
  const sum = (name) => live.reduce((total, worker) => total + worker[name], 0);
  // Who sent how many bytes is not told: each as many as its part of the sequences.
  const bytesEach = sum("handed_over_per_s") > 0 ? sum("fetched_bytes_per_s") / sum("handed_over_per_s") : 0;
  return live.flatMap((worker) => {
    const name = `${worker.role}/${worker.worker_id}`;
    const prompts = Math.min(worker.prompt_tokens_per_s, worker.tokens_per_s);
    return [
      { key: `p ${name}`, kind: "prompts", from: "router", to: name, rate: prompts, own: "prefill" },
      { key: `o ${name}`, kind: "kv", from: name, to: "kv", rate: bytesEach * worker.handed_over_per_s, own: "prefill" },
      { key: `i ${name}`, kind: "kv", from: "kv", to: name, rate: worker.fetched_bytes_per_s, own: "decode" },
      { key: `t ${name}`, kind: "tokens", from: name, to: "router", rate: worker.tokens_per_s - prompts, own: "decode" },
    ].filter(({ own, rate }) => own === worker.role || rate > 0);
  });
}

class WorkerCard {
  constructor(role) {
    this.role = role;
    this.name = el("span", { class: "name" });
    this.state = el("span", { class: "pill" });
    this.kv = new Bar("KV", "Share of its KV blocks that are in use");
    this.seqs = new Bar("Seqs", "Sequences that run, and behind them those that wait");
    this.gpu = el("b");
    this.memory = el("span");
    this.tokens = el("b");
    this.second = el("span", { class: "second" });
    this.moves = el("div", { class: "moves", title: "Sequences that decode here; and a second: prompt and answer both computed here, KV handed over to another worker, KV taken over from one" });
    this.spark = el("span", { class: "sparkbox" });
    this.root = el(
      "li",
      { class: `card ${role}` },
      el("div", { class: "top" }, this.name, this.state),
      this.kv.root,
      this.seqs.root,
      el("div", { class: "gpu", title: "How busy its GPUs are, and how much of their memory is taken, by whomever" }, el("span", { class: "label", text: "GPU" }), this.gpu, this.memory),
      this.moves,
      el("div", { class: "rates" }, el("span", {}, this.tokens, " tok/s"), this.second, this.spark),
    );
  }

  update(worker) {
    const { word, tone } = conditionOf(worker);
    setText(this.name, worker.worker_id);
    this.name.title = `${worker.worker_id} at ${worker.address}, transports: ${worker.transports.join(", ") || "none"}`;
    setText(this.state, word);
    this.state.className = `pill ${tone}`;
    this.root.classList.toggle("away", worker.gone);
    const usage = kvUsage(worker);
    this.kv.set([usage], percent(usage), usage > 0.95 ? "bad" : usage > 0.85 ? "warn" : "");
    const waiting = worker.num_waiting + worker.num_reserved;
    const room = Math.max(1, worker.max_num_seqs);
    this.seqs.set(
      [worker.num_running / room, waiting / room],
      waiting ? `${worker.num_running} + ${waiting}` : `${worker.num_running}`,
      worker.num_waiting > 0 ? "warn" : "",
    );
    setText(this.moves, movesOf(worker));
    const { busy, memory } = gpuWords(worker);
    setText(this.gpu, busy);
    setText(this.memory, memory);
    setText(this.tokens, count(worker.gone ? 0 : worker.tokens_per_s));
    const queued = Number(worker.num_queued_tokens);
    const moving = [queued && `${count(queued)} queued`, worker.fetched_bytes_per_s > 0 && bytesPerSecond(worker.fetched_bytes_per_s)];
    setText(this.second, moving.filter(Boolean).join(" · ") || `hits ${percent(hitRate(worker))}`);
    this.spark.replaceChildren(sparkline(worker.recent, { tone: this.role, width: 72, height: 18 }));
  }
}

/** What becomes of the sequences of a worker. Pure. */
export function movesOf(worker) {
  const [kept, out, taken] = ["kept_per_s", "handed_over_per_s", "taken_over_per_s"].map((name) => perSecond(worker.gone ? 0 : worker[name]));
  return `${worker.gone ? 0 : worker.num_decoding} decode · kept ${kept} · out ${out} · in ${taken}`;
}

class Bar {
  constructor(label, about) {
    this.parts = [el("span", { class: "part" }), el("span", { class: "part behind" })];
    this.text = el("span", { class: "number" });
    this.root = el(
      "div",
      { class: "bar", title: about },
      el("span", { class: "label", text: label }),
      el("span", { class: "track", "aria-hidden": "true" }, ...this.parts),
      this.text,
    );
  }

  set(shares, text, tone) {
    let left = 1;
    this.parts.forEach((part, i) => {
      const share = Math.min(left, Math.max(0, shares[i] ?? 0));
      left -= share;
      part.style.width = `${(share * 100).toFixed(1)}%`;
    });
    setText(this.text, text);
    this.root.dataset.tone = tone;
  }
}

/** Whether prefill or decode has more to do: 1 in the middle. */
class Balance {
  constructor() {
    this.scale = balance();
    this.mark = el("span", { class: "mark" });
    this.text = el("b");
    this.root = el(
      "div",
      { class: "balance", title: "Seconds of prompts to compute per worker for prefill, for each second of answers to decode per worker for decode" },
      el("div", { class: "line" }, el("span", { text: "P : D load" }), this.text),
      el("div", { class: "track", "aria-hidden": "true" }, this.mark),
      el("div", { class: "line ends", "aria-hidden": "true" }, el("span", { text: "decode short" }), el("span", { text: "prefill short" })),
    );
  }

  set(value) {
    const known = value !== undefined && value !== null;
    setText(this.text, known ? ratio(value) : "idle");
    this.mark.hidden = !known;
    if (known) this.mark.style.left = `${(this.scale.of(value) * 100).toFixed(1)}%`;
  }
}

function meters(title, names) {
  const values = Object.fromEntries(names.map((name) => [name, el("dd")]));
  const root = el(
    "section",
    { class: "node", "aria-label": title },
    el("h3", { text: title }),
    el("dl", {}, ...names.map((name) => el("div", {}, el("dt", { text: name }), values[name]))),
  );
  return {
    root,
    set(name, text, tone = "") {
      setText(values[name], text);
      values[name].dataset.tone = tone;
    },
  };
}

/** Every figure of every worker. */
export class WorkerTable {
  static #COLUMNS = [
    ["Worker", (w) => w.worker_id],
    ["For", (w) => w.role],
    ["State", (w) => conditionOf(w).word],
    ["Running", (w) => w.num_running],
    ["Waiting", (w) => w.num_waiting],
    ["Reserved", (w) => w.num_reserved],
    ["Held", (w) => w.num_held],
    ["Decoding", (w) => w.num_decoding],
    ["KV in use", (w) => percent(kvUsage(w))],
    ["Blocks", (w) => w.num_blocks],
    ["GPU busy", (w) => gpuWords(w).busy],
    ["GPU memory", (w) => gpuWords(w).memory || "none"],
    ["Queued tokens", (w) => count(Number(w.num_queued_tokens))],
    ["Context tokens", (w) => count(Number(w.num_context_tokens))],
    ["Tokens/s", (w) => count(w.tokens_per_s)],
    ["Of prompts", (w) => count(w.prompt_tokens_per_s)],
    ["Kept", (w) => perSecond(w.kept_per_s)],
    ["Handed over", (w) => perSecond(w.handed_over_per_s)],
    ["Taken over", (w) => perSecond(w.taken_over_per_s)],
    ["Hit rate", (w) => percent(hitRate(w))],
    ["KV fetched", (w) => bytesPerSecond(w.fetched_bytes_per_s)],
    ["Transports", (w) => w.transports.join(", ") || "none"],
    ["Address", (w) => w.address],
    ["Does", (w) => (w.both_roles ? "both" : w.role === "decode" && w.local_prefill ? "decode, own prompts" : `${w.role} only`)],
    ["Engine's process", (w) => w.engine_pid || "none of its own"],
    ["Up", (w) => seconds(Math.max(0, Date.now() / 1e3 - Number(w.epoch) / 1e6))],
  ];

  constructor() {
    this.body = el("tbody");
    const heads = WorkerTable.#COLUMNS.map(([name]) => el("th", { scope: "col", text: name }));
    this.root = el(
      "details",
      { class: "as-table panel" },
      el("summary", { text: "Workers as a table" }),
      el(
        "div",
        { class: "scroll", tabindex: "0", role: "region", "aria-label": "Workers, as a table" },
        el("table", {}, el("caption", { class: "unseen", text: "Workers" }), el("thead", {}, el("tr", {}, ...heads)), this.body),
      ),
    );
  }

  update(state) {
    if (!this.root.open) return;
    const rows = ["prefill", "decode"].flatMap((role) => workersOf(state, role)).map((worker) => WorkerTable.#COLUMNS.map(([, of]) => String(of(worker))));
    while (this.body.children.length > rows.length) this.body.lastElementChild.remove();
    rows.forEach((cells, i) => {
      if (!this.body.children[i]) {
        this.body.append(el("tr", {}, ...cells.map((_, n) => (n ? el("td") : el("th", { scope: "row" })))));
      }
      cells.forEach((text, n) => setText(this.body.children[i].children[n], text));
    });
  }
}
