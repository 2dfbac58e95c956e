// What the autoscaler wants, and why: a line below the map, where there is one that has decided something.

import { el, seconds, setText } from "./format.js";

const MOST_SWITCHES = 4;

/** So many workers serve, so many are wanted; and those started in the role (the pods of its Deployment, on Kubernetes), where they change
 * or are others than the workers. */
function wishOf(role) {
  const moving = role.pods !== role.wanted_pods ? ` (${role.pods} → ${role.wanted_pods} started as such)` : "";
  const elsewhere = role.wanted_pods !== role.wanted_workers ? ` (${role.wanted_pods} started as such)` : "";
  return `${role.role} ${role.serving_workers} of ${role.wanted_workers}${moving || elsewhere}`;
}

/** The words of it; null: nothing was decided. `scaling` as twostep.v1.Scaling in JSON. */
export function wordsOf(scaling) {
  if (!scaling) return null;
  const trouble = scaling.problem ? `Its decision cannot be read: ${scaling.problem}` : "";
  if (!scaling.roles.length) return { wish: "", state: "", when: "", why: "", trouble };
  const age = seconds(scaling.age_s < 120 ? Math.max(1, Math.round(scaling.age_s)) : scaling.age_s);
  const switches = scaling.switches.slice(0, MOST_SWITCHES).map((each) => `${each.worker_id} becomes ${each.role}`);
  const more = scaling.switches.length - MOST_SWITCHES;
  const why = [scaling.reason, scaling.limit && `held back by ${scaling.limit}`, switches.join(", "), more > 0 && `and ${more} more`];
  return {
    wish: `${scaling.roles.map(wishOf).join(", ")} workers`,
    state: scaling.stale ? "stale" : "",
    when: scaling.stale ? `nobody has decided for ${age}, ${scaling.leader} was the last; see that it runs, and its log` : `${age} ago, by ${scaling.leader}`,
    why: why.filter(Boolean).join("; "),
    trouble,
  };
}

export class ScalingLine {
  constructor() {
    this.parts = {
      wish: el("b", { title: "Workers that serve, of those that are wanted" }),
      state: el("span", { class: "pill warn" }),
      when: el("span", { class: "when" }),
      why: el("p", { class: "why" }),
      trouble: el("p", { class: "trouble" }),
    };
    const { wish, state, when, why, trouble } = this.parts;
    this.root = el(
      "section",
      { class: "scaling", "aria-label": "Autoscaler", hidden: true },
      el("div", { class: "wish" }, el("h3", { text: "Autoscaler" }), wish, state, when),
      why,
      trouble,
    );
  }

  update({ status }) {
    const words = wordsOf(status?.scaling);
    this.root.hidden = !words;
    for (const [name, text] of Object.entries(words ?? {})) {
      setText(this.parts[name], text);
      this.parts[name].hidden = !text;
    }
  }
}
