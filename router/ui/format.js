// Numbers as people read them, and elements as the page makes them. Pure but for `el` and `svg`.

const NONE = "–";

export function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

function digits(value, most = 3) {
  const size = Math.abs(value);
  const after = size >= 100 ? 0 : size >= 10 ? 1 : 2;
  return value.toLocaleString("en", { maximumFractionDigits: Math.min(after, most), useGrouping: false });
}

/** 1234 -> "1.23 k" */
export function count(value) {
  if (!isNumber(value)) return NONE;
  for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e4]]) {
    if (Math.abs(value) >= size) return `${digits(value / (unit === "k" ? 1e3 : size))} ${unit}`;
  }
  return digits(value, Math.abs(value) >= 100 ? 0 : 1);
}

/** Seconds as µs, ms, s, min. */
export function seconds(value) {
  if (!isNumber(value)) return NONE;
  if (value === 0) return "0 ms";
  if (value < 1e-3) return `${digits(value * 1e6)} µs`;
  if (value < 0.9995) return `${digits(value * 1e3)} ms`;
  if (value < 120) return `${digits(value)} s`;
  if (value < 7200) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  if (value < 172800) return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
  return `${Math.floor(value / 86400)} d ${Math.floor((value % 86400) / 3600)} h`;
}

/** How long ago, on an axis. */
export function ago(value) {
  return value < 60 ? `−${digits(value)} s` : `−${digits(value / 60, 1)} min`;
}

/** Of the last seconds: "5 min". */
export function span(value) {
  return value < 60 ? `${value} s` : `${digits(value / 60, 1)} min`;
}

export function bytes(value) {
  if (!isNumber(value)) return NONE;
  for (const [unit, size] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (value >= size) return `${digits(value / size)} ${unit}`;
  }
  return `${digits(value, 0)} B`;
}

export function bytesPerSecond(value) {
  return isNumber(value) ? `${bytes(value)}/s` : NONE;
}

export function perSecond(value) {
  return isNumber(value) ? `${count(value)}/s` : NONE;
}

export function percent(value) {
  if (!isNumber(value)) return NONE;
  const parts = value * 100;
  return `${parts > 0 && parts < 10 ? digits(parts, 1) : Math.round(parts)} %`;
}

/** The ratio of prefill work to decode work: 2.5 is "2.5 : 1", 0.4 is "1 : 2.5", and what has all but faded "0 : 1". */
export function ratio(value) {
  if (!isNumber(value)) return NONE;
  if (value >= 1) return `${digits(value, 1)} : 1`;
  return value >= 1e-3 ? `1 : ${digits(1 / value, 1)}` : "0 : 1";
}

export function plural(number, one, many = `${one}s`) {
  return `${number} ${number === 1 ? one : many}`;
}

export function clock(unixSeconds) {
  return new Date(unixSeconds * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
}

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "text") node.textContent = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** An element. Children that are strings become text: nothing is ever parsed as HTML. */
export function el(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** Sets the text only if it is another: what is selected stays selected. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
