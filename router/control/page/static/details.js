// The sheet that a click on a client, a worker or a request opens. What is open stands in the URL: #client=NAME.

import { become, byId, detailsLink, el } from "./dom.js";
import { clock, compact, percent, seconds } from "./format.js";
import { fillDecisions } from "./decisions.js";
import { read } from "./router.js";
import { showTimeline } from "./timeline.js";

const KINDS = ["client", "worker", "request"];

/** The sheet. */
export class Details {
  #dialog = byId("details");
  #body = byId("details-body");
  #decisions;
  #opened = null;

  /** `decisions` keeps the latest decisions. */
  constructor(decisions) {
    this.#decisions = decisions;
    byId("close").addEventListener("click", () => this.#dialog.close());
    this.#dialog.addEventListener("click", (event) => event.target === this.#dialog && this.#dialog.close());
    this.#dialog.addEventListener("close", () => {
      this.#opened = null;
      if (location.hash) history.pushState(null, "", location.pathname + location.search);
    });
  }

  /** Open what the URL names, or close the sheet if it names nothing. */
  async open(frame) {
    const [kind, name] = location.hash.slice(1).split("=", 2);
    if (!KINDS.includes(kind) || !name) {
      if (this.#dialog.open) this.#dialog.close();
      return;
    }
    this.#opened = { kind, name: decodeURIComponent(name), ended: false };
    byId("details-title").replaceChildren(el("small", { textContent: kind }), ` ${this.#opened.name}`);
    this.#body.replaceChildren(el("p", { className: "empty", textContent: "…" }));
    if (!this.#dialog.open) this.#dialog.showModal();
    await this.update(frame);
  }

  /** Show what is open as it is now. */
  async update(frame) {
    const opened = this.#opened;
    if (opened === null || frame === null || opened.ended) return;
    const parts = await this[`_${opened.kind}`](opened, frame);
    if (opened === this.#opened) become(this.#body, parts);
  }

  async _client({ name }, { fairness }) {
    const client = fairness.clients[name] ?? (await read(`clients?search=${encodeURIComponent(name)}`))?.[name];
    if (!client) return [missing("The router does not remember this client.")];
    const { service } = client;
    const deficits = Object.entries(client.deficit).map(([worker, { placement, order }]) => [
      detailsLink("worker", worker),
      compact(placement),
      compact(order),
    ]);
    const list = el("ol", { className: "decisions" });
    fillDecisions(list, this.#decisions.of(name));
    return [
      facts([
        ["Share, last minute", percent(client.share)],
        ["Weight", compact(client.weight)],
        ["Waiting", `${compact(client.queued)} requests`],
        ["Running", `${compact(client.running)} requests`],
        ["Wait, median", seconds(client.wait_p50_s)],
        ["Wait, p95", seconds(client.wait_p95_s)],
        ["Unserved for", seconds(client.unserved_s)],
        ["Service lag", `${compact(client.service_lag)} cost units`],
        ["Cost so far", `${compact(service.cost)} cost units`],
        ["Input computed", `${compact(service.extend)} tokens`],
        ["Input cached", `${compact(service.cached)} tokens`],
        ["Output", `${compact(service.output)} tokens`],
      ]),
      ...section("Deficits, cost units", table(["Worker", "placement", "order"], deficits), deficits.length, "The policy keeps none, or no worker is up."),
      ...section("Latest decisions", list, list.children.length, "None among the latest."),
    ];
  }

  async _worker({ name }, { fairness }) {
    const worker = fairness.workers[name];
    if (!worker) return [missing("There is no such worker.")];
    const { window: limits, cache, work } = worker;
    const evicted = Object.entries(cache?.evicted ?? {}).map(([signal, tokens]) => [signal, compact(tokens)]);
    const share = (part) => (cache?.prompt ? percent(part / cache.prompt) : "–");
    const barrier = worker.barrier ? [["Steps with", worker.barrier]] : [];
    const rank = worker.rank === undefined || worker.rank === null ? [] : [["Rank", String(worker.rank)]];
    return [
      facts([
        ["Address", worker.url],
        ["Health", worker.healthy ? "answers polls" : "does not answer polls"],
        ["Circuit breaker", worker.breaker ?? "–"],
        ...rank,
        ...barrier,
        ["Running", `${compact(worker.running)} of ${limits ? compact(limits.requests) : "∞"} requests`],
        ["Unstarted", `${compact(worker.unstarted_tokens)} of ${limits ? compact(limits.unstarted_tokens) : "∞"} tokens`],
        ["Waiting for it", `${compact(worker.queued)} requests`],
        ["KV cache", `${compact(worker.kv_tokens)} tokens`],
        ["Service gap", `${compact(worker.service_gap)} cost units`],
        ["Its bound", `${compact(worker.service_gap_bound)} cost units`],
        ["Charged of computed", percent(work?.charged_of_computed)],
      ]),
      el("h3", { textContent: "Prefix cache, since it joined" }),
      facts([
        ["Believed cached", `${compact(cache?.believed)} tokens`],
        ["Hit rate, actual", share(cache?.actual)],
        ["Hit rate, predicted", share(cache?.predicted)],
        ["Predicted, not cached", share(cache?.false_hit)],
        ["Cached, not predicted", share(cache?.missed_hit)],
        ["Error of the last 200", percent(cache?.error)],
      ]),
      ...section("Evicted, tokens by signal", table(["Signal", "tokens"], evicted), evicted.length, "Nothing yet."),
    ];
  }

  async _request(opened) {
    const explanation = await read(`../explain/${encodeURIComponent(opened.name)}`);
    if (explanation === null) return [missing("The router remembers the last 10,000 requests, and this is none of them.")];
    opened.ended = explanation.times.ended_s !== null;
    const { usage, dispatch, times } = explanation;
    const rows = [
      ["Client", detailsLink("client", explanation.client)],
      ["Model", explanation.model || "any"],
      ["Policy", explanation.policy],
      ["State", explanation.state],
      ["Arrived", clock(Date.parse(times.arrived) / 1000)],
      ["Waited", seconds(times.waited_s)],
    ];
    if (dispatch) rows.push(["Predicted cached", `${compact(dispatch.predicted_cached_tokens)} tokens`]);
    if (usage) {
      rows.push(["Cached", `${compact(usage.cached_tokens)} tokens`]);
      rows.push(["Input", `${compact(usage.input_tokens)} tokens`]);
      rows.push(["Output", `${compact(usage.output_tokens)} tokens`]);
    }
    return [showTimeline(explanation), el("h3", { textContent: "Facts" }), facts(rows)];
  }
}

function section(title, content, filled, empty) {
  return [el("h3", { textContent: title }), filled ? content : missing(empty)];
}

function facts(rows) {
  return el("dl", {}, ...rows.map(([name, value]) => el("div", {}, el("dt", { textContent: name }), el("dd", {}, value))));
}

function table(heads, rows) {
  const cells = (row) => row.map((cell, index) => el("td", { className: index ? "number" : "" }, cell));
  return el(
    "table",
    {},
    el("thead", {}, el("tr", {}, ...heads.map((head, index) => el("th", { className: index ? "number" : "", textContent: head })))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...cells(row)))),
  );
}

function missing(text) {
  return el("p", { className: "empty", textContent: text });
}
