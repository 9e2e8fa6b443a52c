// Calls to the router. The operator's key, where one is set, is sent with each and kept in this tab only.

const KEY = "d2lpm-admin-key";
const RETRY_MS = [500, 1000, 2000, 5000];

/** The router refused a call for want of the operator's key. */
export class Refused extends Error {}

/** Keep a key for this tab. */
export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

/** Return the JSON answer of a path, relative to the page. Null if the router answers 404. Throws Refused. */
export async function read(path) {
  const answer = await call(path);
  return answer.status === 404 ? null : answer.json();
}

/**
 * Follow the frames of the page until the signal aborts, and connect again whenever the stream breaks. `onFrame` gets
 * each frame; `onState` gets "live" or "reconnecting". Throws Refused.
 */
export async function follow(onFrame, onState, signal) {
  for (let tries = 0; !signal.aborted; tries++) {
    try {
      for await (const frame of frames(signal)) {
        tries = 0;
        onState("live");
        onFrame(frame);
      }
    } catch (error) {
      if (error instanceof Refused) throw error;
      if (signal.aborted) return;
    }
    onState("reconnecting");
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS[Math.min(tries, RETRY_MS.length - 1)]));
  }
}

/** Yield the frames of one connection. A plain EventSource could not send the key. */
async function* frames(signal) {
  const answer = await call("events", signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const frame = event.startsWith("data: ") ? JSON.parse(event.slice(6)) : {};
      if (frame.fairness) yield frame;
    }
  }
}

async function call(path, signal) {
  const key = sessionStorage.getItem(KEY);
  const headers = key === null ? {} : { authorization: `Bearer ${key}` };
  const answer = await fetch(path, { headers, signal, cache: "no-store" });
  if (answer.status === 401) throw new Refused();
  if (!answer.ok && answer.status !== 404) throw new Error(`the router answered ${answer.status}`);
  return answer;
}
