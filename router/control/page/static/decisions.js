// The decisions of the scheduler as they happen.

import { byId, detailsLink, el, reconcile, setText } from "./dom.js";
import { clock, compact, seconds } from "./format.js";

const KEPT = 60;

/** The latest decisions. A frame has the last thirty, so some are left out where there are more in a second. */
export class Decisions {
  #kept = [];

  /** Add the decisions of a frame, and show all. */
  show(frame) {
    // After a restart of the scheduler the numbers begin anew.
    const known = this.#kept[0]?.number ?? 0;
    const last = (frame.decisions.at(-1)?.number ?? known) < known ? 0 : known;
    const added = frame.decisions.filter((decision) => decision.number > last).reverse();
    this.#kept = [...added, ...this.#kept].slice(0, KEPT);
    byId("decisions-empty").hidden = this.#kept.length > 0;
    reconcile(byId("decisions"), this.#kept, keyOf, create, update);
  }

  /** Return the decisions about a client, newest first. */
  of(client) {
    return this.#kept.filter((decision) => decision.client === client);
  }
}

/** Show decisions in a list. */
export function fillDecisions(list, decisions) {
  reconcile(list, decisions, keyOf, create, update);
}

function keyOf(decision) {
  return `${decision.number} ${decision.time}`;
}

function create(decision) {
  const { request, client, worker } = decision;
  const refused = worker === null;
  return el(
    "li",
    { className: refused ? "refused" : "" },
    el("time", { textContent: clock(decision.time) }),
    el(
      "p",
      {},
      detailsLink("client", client),
      ...(refused ? [" refused"] : [" → ", detailsLink("worker", worker)]),
      el("small", {}, detailsLink("request", request), el("span")),
    ),
  );
}

function update(item, { why, waited_s, cached_tokens, passed_over, worker }) {
  const parts = [why, `waited ${seconds(waited_s)}`];
  if (worker !== null) parts.push(`${compact(cached_tokens)} tokens cached`);
  if (passed_over) parts.push(`${compact(passed_over)} passed over`);
  setText(item.querySelector("small span"), ` · ${parts.join(" · ")}`);
}
