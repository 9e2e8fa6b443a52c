// What /explain answers about a request, drawn as a time line.

import { detailsLink, el } from "./dom.js";
import { compact, seconds } from "./format.js";

/** Return the time line of an explanation: a bar of its stages, to scale, and its events in order. */
export function showTimeline(explanation) {
  const stages = stagesOf(explanation.times, explanation.state);
  const end = Math.max(stages.at(-1).to, 1e-9);
  const bars = stages.map(({ name, kind, from, to }) => {
    const bar = el("i", { className: kind, title: `${name}: ${seconds(to - from)}` });
    bar.style.width = `${(100 * (to - from)) / end}%`;
    return bar;
  });
  const legend = stages.map(({ name, kind, from, to }) =>
    el("li", {}, el("i", { className: `swatch ${kind}` }), `${name} `, el("b", { textContent: seconds(to - from) })),
  );
  const axis = el("div", { className: "axis" }, el("span", { textContent: "0 s" }), el("span", { textContent: seconds(end) }));
  return el(
    "div",
    { className: "timeline" },
    el("div", { className: "stages" }, ...bars),
    axis,
    el("ul", { className: "legend" }, ...legend),
    el("ol", {}, ...eventsOf(explanation).map(drawEvent)),
  );
}

function stagesOf(times, state) {
  const now = times.ended_s ?? Math.max(times.waited_s, times.started_s ?? 0, times.dispatched_s ?? 0);
  const sent = times.dispatched_s ?? now;
  const stages = [{ name: "waited", kind: "waiting", from: 0, to: sent }];
  if (times.dispatched_s === null) return stages;
  const first = times.started_s !== null && times.started_s >= sent ? times.started_s : null;
  if (first === null) return [...stages, { name: "at the worker", kind: "prefill", from: sent, to: Math.max(sent, now) }];
  stages.push({ name: "to the first token", kind: "prefill", from: sent, to: first });
  if (times.ended_s !== null) stages.push({ name: state === "finished" ? "answered" : "until its end", kind: "decode", from: first, to: times.ended_s });
  return stages;
}

function eventsOf({ times, tried, held_back, sent_ahead, dispatch, prefill, handoffs_lost, state, reason, retry_after_s, usage }) {
  const events = [{ at: 0, title: "Arrived" }];
  const waits = Object.entries(held_back).map(([why, times_]) => `passed over ${times_} × (${why})`);
  const ahead = Object.entries(sent_ahead).map(([client, times_]) => [detailsLink("client", client), ` ${times_} ×`]);
  if (times.waited_s > 0 || waits.length) {
    const whom = ahead.length ? ["sent ahead of it: ", ...joined(ahead)] : ["for its turn, or for room in a window"];
    events.push({ at: null, title: `Waited ${seconds(times.waited_s)}`, notes: [whom, ...waits.map((wait) => [wait])] });
  }
  for (const worker of tried) events.push({ at: null, title: "Retried", notes: [["failed at ", detailsLink("worker", worker)]], bad: true });
  if (handoffs_lost) events.push({ at: null, title: "Prefilled again", notes: [[`${handoffs_lost} × a prefilled prompt was given up`]], bad: true });
  if (prefill && prefill.worker !== dispatch?.worker) events.push({ at: null, title: "Sent to be prefilled", notes: placement(prefill) });
  if (times.prefilled_s !== null) events.push({ at: times.prefilled_s, title: "Prompt computed" });
  if (dispatch) events.push({ at: times.dispatched_s, title: "Sent", notes: placement(dispatch) });
  if (times.started_s !== null) events.push({ at: times.started_s, title: "First token" });
  if (times.ended_s !== null) {
    const notes = [];
    if (reason) notes.push([reason]);
    if (retry_after_s !== null) notes.push([`may be repeated after ${seconds(retry_after_s)}`]);
    if (usage?.output_tokens !== undefined) notes.push([`${compact(usage.output_tokens)} output tokens`]);
    events.push({ at: times.ended_s, title: state[0].toUpperCase() + state.slice(1), notes, bad: state !== "finished" });
  }
  return events;
}

function placement({ worker, why, match, predicted_cached_tokens, deficit, load, limits, passed_over }) {
  const notes = [["to ", detailsLink("worker", worker), `, because: ${why}`]];
  const matches = Object.entries(match).sort((a, b) => b[1] - a[1]).map(([at, tokens]) => [detailsLink("worker", at), ` ${compact(tokens)}`]);
  notes.push(matches.length ? [`predicted cached: ${compact(predicted_cached_tokens)} tokens; longest match by worker: `, ...joined(matches)] : ["no worker held its prefix"]);
  const deficits = Object.entries(deficit).filter(([, value]) => value !== null).map(([name, value]) => `${name} ${compact(value)}`);
  if (deficits.length) notes.push([`deficit before: ${deficits.join(", ")} cost units`]);
  const room = limits ? ` of ${compact(limits.requests)}` : "";
  notes.push([`in flight there: ${compact(load.requests)}${room} requests, ${compact(load.unstarted_tokens)} tokens unstarted`]);
  if (passed_over.length) notes.push([`${compact(passed_over.length)} requests ahead of it could not be sent`]);
  return notes;
}

function drawEvent({ at, title, notes = [], bad = false }) {
  const time = el("time", { textContent: at === null ? "" : seconds(at) });
  const lines = notes.map((note) => el("small", {}, ...note));
  return el("li", { className: bad ? "bad" : "" }, time, el("div", {}, el("b", { textContent: title }), ...lines));
}

function joined(groups) {
  return groups.flatMap((group, index) => (index ? [", ", ...group] : group));
}
