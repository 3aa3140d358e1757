// The server's API, and its errors in words. Addresses are relative: the page works behind a prefix.

import { eventData } from "./sse.js";

/** What the server, or the way to it, refused. `param` names the field of the request, where one is at fault. */
export class ServerError extends Error {
  constructor(message, { status = 0, param = null } = {}) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

const UNREACHABLE = "The server cannot be reached. Check that it runs and that the network is up, then try again.";
const SAID = new Set(["loading", "ready", "draining", "failed", "closed"]);
const PATIENCE = 5000; // milliseconds
const CUT = "The answer was cut off: the connection closed before its end.";

function headers(key, more = {}) {
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

const capital = (sentence) => sentence.charAt(0).toUpperCase() + sentence.slice(1);

/** A sentence for a refusal: what the server said, and what to do. */
function inWords(status, error, retryAfter) {
  const said = typeof error?.message === "string" && error.message ? error.message : `The server answered ${status}.`;
  const sentence = /[.!?]$/.test(said) ? said : `${said}.`;
  if (status === 401) return `${capital(sentence)} Enter the server's API key under Settings.`;
  if (status === 429 || status === 503) {
    const seconds = Number(retryAfter);
    const when = retryAfter && seconds > 0 ? `in ${seconds} second${seconds === 1 ? "" : "s"}` : "in a moment";
    return `${status === 429 ? "The server is busy" : "The server is not ready"}: ${sentence} Try again ${when}.`;
  }
  if (error?.param && !said.includes(error.param)) return `${error.param}: ${sentence}`;
  const isName = /^\w*[_[.]\w/.test(sentence) || (error?.param && sentence.startsWith(error.param));
  return isName ? sentence : capital(sentence); // the name of a field stays as it is written
}

async function refusal(response) {
  let error = null;
  try {
    error = (await response.json()).error;
  } catch {
    // a proxy may answer in something else than JSON; the status has to do
  }
  const message = inWords(response.status, error, response.headers.get("Retry-After"));
  return new ServerError(message, { status: response.status, param: error?.param ?? null });
}

async function reach(address, options) {
  try {
    return await fetch(address, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(UNREACHABLE);
  }
}

/** The state that the server tells: one of SAID; "unreachable" where it tells none. */
export async function health() {
  try {
    const response = await fetch("health", { cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
    const { status } = await response.json();
    return SAID.has(status) ? status : "unreachable";
  } catch {
    return "unreachable"; // no network, no answer in time, or a proxy's own words
  }
}

/** The entries of the model list. */
export async function models(key) {
  const response = await reach("v1/models", { headers: headers(key), cache: "no-store" });
  if (!response.ok) throw await refusal(response);
  return (await response.json()).data;
}

/** The text of the server's metrics. */
export async function metricsText() {
  const response = await reach("metrics", { cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
  if (!response.ok) throw await refusal(response);
  return response.text();
}

/** Send a chat request and hand each chunk of its answer to `onChunk`. Abort `signal` to stop it. */
export async function streamChat(body, key, signal, onChunk) {
  const response = await reach("v1/chat/completions", {
    method: "POST",
    headers: headers(key, { "Content-Type": "application/json" }),
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await refusal(response);
  const events = eventData(response.body);
  try {
    for (;;) {
      const { value: data, done } = await nextEvent(events);
      if (done) throw new ServerError(CUT);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(inWords(500, chunk.error, null), { param: chunk.error.param ?? null });
      onChunk(chunk);
    }
  } finally {
    events.return();
  }
}

async function nextEvent(events) {
  try {
    return await events.next();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(CUT); // a lost connection is a TypeError with words of the browser's own
  }
}
