// The live page: follows the router's frames, and shows each.

import { byId, setText } from "./dom.js";
import { count, seconds } from "./format.js";
import { Clients, Workers, showHeat } from "./tables.js";
import { Decisions } from "./decisions.js";
import { Details } from "./details.js";
import { Overview } from "./overview.js";
import { Refused, follow, read, setKey } from "./router.js";
import { Samples } from "./samples.js";

const LINGER_MS = 10_000;

const samples = new Samples();
const overview = new Overview();
const clients = new Clients(overview.colours, show);
const workers = new Workers(show);
const decisions = new Decisions();
const details = new Details(decisions);
let frame = null;
let found = null;
let stream = null;

/** Show the newest frame everywhere. */
function show() {
  if (frame === null) return;
  overview.show(frame, samples.last(Number(byId("span").value)));
  showHeat(clients.show(frame, found), frame.fairness.workers);
  workers.show(frame);
  setText(byId("policy"), frame.fairness.policy);
  const cost = seconds(frame.cost_s);
  setText(byId("foot"), `${count(frame.totals.clients, "client")}; the router computed this frame in ${cost}, once for all readers.`);
}

async function take(next) {
  const first = frame === null;
  frame = next;
  samples.add(next);
  decisions.show(next);
  await search();
  show();
  if (first) await details.open(next);
  else await details.update(next);
}

async function search() {
  const text = byId("search").value.trim();
  found = text ? await read(`clients?search=${encodeURIComponent(text)}`) : null;
}

function showState(state) {
  byId("state").dataset.state = state;
  setText(byId("state"), state);
}

/** Follow the router until it asks for the key or the page is hidden. */
async function start() {
  if (stream !== null) return;
  const current = new AbortController();
  stream = current;
  try {
    samples.begin(await read("history"));
    byId("main").hidden = false;
    byId("login").hidden = true;
    await follow((next) => take(next).catch(report), showState, current.signal);
  } catch (error) {
    report(error);
  } finally {
    if (stream === current) stream = null;
  }
}

function stop() {
  stream?.abort();
  stream = null;
  showState("paused");
}

/** Ask for the key if the router refused a call for want of it; else try again. */
function report(error) {
  if (!(error instanceof Refused)) {
    showState("reconnecting");
    setTimeout(start, 2000);
    return;
  }
  stop();
  showState("locked");
  byId("refused").hidden = byId("key").value === "";
  byId("main").hidden = true;
  byId("login").hidden = false;
  byId("key").focus();
}

byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value);
  start();
});
byId("find").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = byId("search").value.trim();
  if (text && (await read(`../explain/${encodeURIComponent(text)}`))) location.hash = `request=${encodeURIComponent(text)}`;
});
byId("search").addEventListener("input", () => search().then(show, report));
byId("span").addEventListener("change", show);
addEventListener("hashchange", () => details.open(frame).catch(report));

let hiding;
document.addEventListener("visibilitychange", () => {
  clearTimeout(hiding);
  // A page that nobody sees costs the router nothing.
  if (document.hidden) hiding = setTimeout(stop, LINGER_MS);
  else start();
});

start();
