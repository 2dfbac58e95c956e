// What the page asks the router: by fetch, with the API key if one was given, relative to where the page itself came from.

import { events } from "./sse.js";

const ROOT = new URL("../", import.meta.url);
const KEY = "twostep.api-key";
const TIMEOUT_MS = 10_000;
// Events come once a second: without any for so long the connection is dead.
const SILENT_MS = 6_000;
const POLL_MS = 3_000;
const LONGEST_WAIT_MS = 10_000;

/** `status` 0: the router was not reached. */
export class ApiError extends Error {
  constructor(status, message, { retryAfterS = 0, requestId = "", code = "" } = {}) {
    super(message);
    Object.assign(this, { status, retryAfterS, requestId, code });
  }
}

export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY)),
};

function headers(more) {
  const key = apiKey.get();
  return { ...more, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function failure(response) {
  let message = `the router answered ${response.status} ${response.statusText}`.trim();
  let code = "";
  try {
    const { error } = await response.json();
    message = error.message ?? message;
    code = error.code ?? "";
  } catch {
    // Not the router's own answer: a proxy's.
  }
  return new ApiError(response.status, message, {
    code,
    retryAfterS: Number(response.headers.get("retry-after")) || 0,
    requestId: response.headers.get("x-request-id") ?? "",
  });
}

async function ask(path, options = {}) {
  let response;
  try {
    response = await fetch(new URL(path, ROOT), { cache: "no-store", ...options, headers: headers(options.headers) });
  } catch (error) {
    if (options.signal?.aborted && error.name === "AbortError") throw error;
    throw new ApiError(0, "the router does not answer; see that it runs and can be reached from here");
  }
  if (!response.ok) throw await failure(response);
  return response;
}

export async function getJson(path) {
  return (await ask(path, { signal: AbortSignal.timeout(TIMEOUT_MS) })).json();
}

/**
 * Follows what the router tells every second, until `signal` is aborted; whatever happens, it is tried again.
 * onEvent({status, point}); onState("live" | "away" | "denied", error, seconds until the next try); `denied()` resolves when there is a new key.
 */
export async function follow({ signal, onHistory, onEvent, onState, newKey }) {
  let failures = 0;
  while (!signal.aborted) {
    const attempt = new AbortController();
    const stop = () => attempt.abort();
    signal.addEventListener("abort", stop);
    let watchdog = 0;
    const touched = () => {
      clearTimeout(watchdog);
      watchdog = setTimeout(stop, SILENT_MS);
    };
    let error = new ApiError(0, "the connection to the router ended");
    try {
      onHistory(await getJson("ui/api/history"));
      touched();
      for await (const data of events(await ask("ui/api/events", { signal: attempt.signal }))) {
        touched();
        failures = 0;
        onState("live");
        onEvent(JSON.parse(data));
      }
    } catch (caught) {
      error = caught instanceof ApiError ? caught : error;
    } finally {
      clearTimeout(watchdog);
      signal.removeEventListener("abort", stop);
    }
    if (signal.aborted) return;
    if (error.status === 401 || error.status === 403) {
      onState("denied", error);
      await newKey();
      continue;
    }
    if (error.status === 429 && (await poll(signal, onEvent, onState))) continue;
    failures += 1;
    const waitMs = Math.min(LONGEST_WAIT_MS, 500 * 2 ** Math.min(failures, 6));
    onState("away", error, waitMs / 1000);
    await sleep(waitMs, signal);
  }
}

/** Too many pages listen already: asks now and then. False if that fails too. */
async function poll(signal, onEvent, onState) {
  for (let i = 0; i < 10 && !signal.aborted; i += 1) {
    try {
      onEvent({ status: await getJson("ui/api/status"), point: null });
      onState("live");
    } catch {
      return false;
    }
    await sleep(POLL_MS, signal);
  }
  return true;
}

function sleep(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}

/** The chunks of a chat's answer. Throws ApiError, and what `signal` was aborted with. */
export async function* chat(body, signal) {
  const response = await ask("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  let ended = false;
  try {
    for await (const data of events(response)) {
      if (data === "[DONE]") {
        ended = true;
        return;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) {
        throw new ApiError(chunk.error.status ?? response.status, chunk.error.message, { code: chunk.error.code ?? "" });
      }
      yield chunk;
    }
  } catch (error) {
    if (signal.aborted || error instanceof ApiError) throw error;
    throw new ApiError(0, "the connection broke before the answer was complete; try again");
  }
  if (!ended && !signal.aborted) throw new ApiError(0, "the answer ended before it was complete; try again");
}
