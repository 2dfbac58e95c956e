// A chat with the model, and where the time of each answer went.

import { chat } from "./api.js";
import { el, seconds, setText } from "./format.js";
import { phasesView } from "./phases.js";

const number = (input) => (input.value.trim() === "" ? undefined : Number(input.value));

export class Playground {
  #messages = [];
  #running = null;

  /** `needKey()` asks for an API key; resolves to whether there is a new one. */
  constructor({ needKey }) {
    this.needKey = needKey;
    this.system = el("textarea", { id: "system", rows: "3", placeholder: "none" });
    this.temperature = numeric("temperature", { min: 0, max: 5, step: 0.1, placeholder: "the model's" });
    this.maxTokens = numeric("max-tokens", { min: 1, step: 1, value: 256 });
    this.ttft = numeric("target-ttft", { min: 1, step: 1, placeholder: "none" });
    this.tpot = numeric("target-tpot", { min: 1, step: 1, placeholder: "none" });
    this.gap = numeric("target-gap", { min: 1, step: 1, placeholder: "none" });
    this.seed = numeric("seed", { step: 1, placeholder: "drawn" });
    this.requestClass = el(
      "select",
      { id: "class" },
      ...[["", "default"], ["interactive", "interactive"], ["standard", "standard"], ["batch", "batch"]].map(([value, text]) => el("option", { value, text })),
    );
    this.log = el("ol", { class: "log", "aria-label": "Conversation" });
    this.hello = el("li", { class: "hello" }, el("p", { text: "Ask something: the answer streams in, and then shows how long each phase of it took and which workers gave it." }));
    this.log.append(this.hello);
    this.said = el("p", { class: "unseen", role: "status" });
    this.input = el("textarea", { id: "prompt", rows: "3", placeholder: "Ask the model something", onkeydown: (event) => this.#key(event) });
    this.send = el("button", { type: "submit", class: "primary", text: "Send" });
    this.stop = el("button", { type: "button", class: "danger", text: "Stop", hidden: true, onclick: () => this.#running?.abort() });
    this.clear = el("button", { type: "button", class: "plain", text: "New chat", onclick: () => this.#clear() });
    this.root = el(
      "section",
      { class: "playground", "aria-labelledby": "playground-title", hidden: true },
      el("h2", { id: "playground-title", class: "unseen", text: "Playground" }),
      this.#settings(),
      el(
        "div",
        { class: "talk panel" },
        this.log,
        this.said,
        el(
          "form",
          { class: "composer", onsubmit: (event) => (event.preventDefault(), this.#ask()) },
          el("label", { class: "unseen", for: "prompt", text: "Your message" }),
          this.input,
          el("div", { class: "actions" }, el("span", { class: "hint", text: "Enter sends, Shift+Enter begins a new line" }), this.clear, this.stop, this.send),
        ),
      ),
    );
  }

  #settings() {
    const field = (label, input, hint) =>
      el("div", { class: "field" }, el("label", { for: input.id, text: label }), input, hint && el("small", { id: `${input.id}-hint`, text: hint }));
    for (const input of [this.ttft, this.tpot, this.gap, this.requestClass]) input.setAttribute("aria-describedby", `${input.id}-hint`);
    return el(
      "form",
      { class: "settings panel", "aria-label": "Settings", onsubmit: (event) => event.preventDefault() },
      field("System prompt", this.system),
      el("div", { class: "pair" }, field("Temperature", this.temperature), field("Max tokens", this.maxTokens)),
      field("Class", this.requestClass, "who goes first where requests wait"),
      el("div", { class: "pair" }, field("TTFT target, ms", this.ttft, "kept, or refused at once"), field("TPOT target, ms", this.tpot, "of each further token")),
      el("div", { class: "pair" }, field("Gap target, ms", this.gap, "longest between tokens"), field("Seed", this.seed)),
    );
  }

  #key(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      this.#ask();
    }
  }

  #clear() {
    this.#running?.abort();
    this.#messages = [];
    this.log.replaceChildren(this.hello);
    this.input.focus();
  }

  async #ask() {
    const text = this.input.value.trim();
    if (!text || this.#running) return;
    this.input.value = "";
    this.hello.remove();
    const question = turn("You", "user");
    setText(question.text, text);
    this.log.append(question.root);
    const before = [...this.#messages, { role: "user", content: text }];
    await this.#answer(before);
  }

  async #answer(messages) {
    const view = turn("Model", "assistant");
    this.log.append(view.root);
    this.#scroll(true);
    const running = (this.#running = new AbortController());
    this.#busy(true);
    const answer = new StreamedAnswer(view);
    try {
      for await (const chunk of chat(this.#body(messages), running.signal)) {
        const follow = this.#atEnd();
        answer.add(chunk);
        if (follow) this.#scroll();
      }
      answer.finish();
      this.#messages = [...messages, { role: "assistant", content: answer.text }];
      setText(this.said, `Answer complete: ${answer.told}`);
    } catch (error) {
      if (this.log.contains(view.root)) this.#failed(error, running.signal.aborted, answer, messages);
    } finally {
      if (this.#running === running) {
        this.#running = null;
        this.#busy(false);
      }
      this.#scroll();
    }
  }

  #failed(error, stopped, answer, messages) {
    answer.cut(stopped);
    if (stopped) {
      if (answer.text) this.#messages = [...messages, { role: "assistant", content: answer.text }];
      setText(this.said, "Stopped.");
      return;
    }
    const again = el("button", { type: "button", class: "plain", text: "Try again" });
    const card = el(
      "div",
      { class: "failure", role: "alert" },
      el("strong", { text: title(error) }),
      el("p", { text: error.message }),
      error.retryAfterS ? el("p", { text: `There should be room in ${seconds(error.retryAfterS)}.` }) : null,
      error.requestId ? el("p", { class: "hint", text: `Request ${error.requestId}` }) : null,
      again,
    );
    again.addEventListener("click", async () => {
      if (this.#running) return;
      if (error.status === 401 && !(await this.needKey())) return;
      answer.view.root.remove();
      await this.#answer(messages);
    });
    answer.view.root.append(card);
    if (error.status === 401) this.needKey();
  }

  #body(messages) {
    const system = this.system.value.trim();
    const body = {
      messages: system ? [{ role: "system", content: system }, ...messages] : messages,
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
      return_phases: true,
      temperature: number(this.temperature),
      max_tokens: number(this.maxTokens),
      seed: number(this.seed),
      request_class: this.requestClass.value || undefined,
      ttft_ms: number(this.ttft),
      tpot_ms: number(this.tpot),
      gap_ms: number(this.gap),
    };
    return body;
  }

  #busy(busy) {
    this.send.hidden = busy;
    this.stop.hidden = !busy;
    this.log.setAttribute("aria-busy", String(busy));
    if (!busy && [document.body, this.stop].includes(document.activeElement)) this.input.focus();
  }

  #atEnd() {
    return this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 60;
  }

  #scroll(always = true) {
    if (always) this.log.scrollTop = this.log.scrollHeight;
  }
}

class StreamedAnswer {
  text = "";
  usage = null;
  told = "";
  #thought = "";
  #begun = performance.now();
  #first = null;
  #extra = null;
  #finish = "";

  constructor(view) {
    this.view = view;
    setText(view.live, "waiting for the first token");
  }

  add(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    if (chunk.twostep) this.#extra = chunk.twostep;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    if (choice.finish_reason) this.#finish = choice.finish_reason;
    const { content, reasoning_content: thought } = choice.delta ?? {};
    if ((content || thought) && this.#first === null) this.#first = performance.now();
    if (thought) {
      this.#thought += thought;
      this.view.showThought(this.#thought);
    }
    if (content) {
      this.text += content;
      setText(this.view.text, this.text);
    }
    this.#tell();
  }

  #tell() {
    if (this.#first === null) return;
    const tokens = this.usage?.completion_tokens ?? 0;
    const elapsed = (performance.now() - this.#first) / 1e3;
    const speed = tokens > 1 && elapsed > 0 ? `${((tokens - 1) / elapsed).toFixed(1)} tokens/s` : "";
    this.told = [`TTFT ${seconds((this.#first - this.#begun) / 1e3)}`, speed, tokens ? `${tokens} tokens` : ""].filter(Boolean).join(" · ");
    setText(this.view.live, this.told);
  }

  finish() {
    this.#tell();
    if (this.#finish === "length") this.told += " · cut at max tokens";
    setText(this.view.live, this.told || "no text");
    if (!this.text) setText(this.view.text, "");
    if (this.#extra) this.view.root.append(phasesView(this.#extra, this.usage));
  }

  cut(stopped) {
    setText(this.view.live, [this.told, stopped ? "stopped" : "not complete"].filter(Boolean).join(" · "));
  }
}

function turn(who, role) {
  const text = el("div", { class: "text" });
  const live = el("span", { class: "live" });
  const root = el("li", { class: `turn ${role}` }, el("div", { class: "who" }, el("h3", { text: who }), live), text);
  let thought = null;
  const showThought = (words) => {
    if (!thought) {
      thought = el("div", { class: "text" });
      text.before(el("details", { class: "thought", open: true }, el("summary", { text: "Reasoning" }), thought));
    }
    setText(thought, words);
  };
  return { root, text, live, showThought };
}

function numeric(id, attributes) {
  return el("input", { id, type: "number", inputmode: "decimal", ...attributes });
}

function title(error) {
  if (error.status === 401) return "An API key is needed";
  if (error.status === 429) return "Refused for now";
  if (error.status === 0) return "No connection";
  if (error.status >= 500) return "The deployment cannot answer now";
  return "The request was refused";
}
