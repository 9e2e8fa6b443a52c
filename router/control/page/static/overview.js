// The row of figures at the top, and the charts over time.

import { byId, detailsHash, el, reconcile, setText } from "./dom.js";
import { compact, count, percent, seconds, short, twoDigits, wholePercent } from "./format.js";
import { Chart } from "./charts.js";
import { hitRates, nearestGap } from "./samples.js";

const STACKED = 8;
const REST = "all others";
const NO_BOUND = "Nothing bounds the gap under this policy, or with these workers.";

/** Gives clients colours. A client keeps its colour while it is among the first. */
class Colours {
  #slots = new Array(STACKED).fill(null);

  /** Return the slot of each of these clients; `clients` has no more than there are colours. */
  assign(clients) {
    this.#slots = this.#slots.map((client) => (clients.includes(client) ? client : null));
    for (const client of clients) {
      if (!this.#slots.includes(client)) this.#slots[this.#slots.indexOf(null)] = client;
    }
    return this.#slots.map((client, slot) => ({ client, colour: `c${slot + 1}` })).filter((each) => each.client !== null);
  }

  /** Return the colour of a client; that of the rest if it has none. */
  of(client) {
    const slot = this.#slots.indexOf(client);
    return slot < 0 ? "rest" : `c${slot + 1}`;
  }
}

/** The figures and charts. `colours` is shared with the table of clients. */
export class Overview {
  colours = new Colours();
  #share = chart("share", { unit: "% of served cost", format: percent, tick: wholePercent, range: [0, 1], area: true, height: 230, empty: "Nothing was served in the last minute." });
  #requests = chart("requests", { unit: "requests", format: compact, tick: compact, whole: true, empty: "No request yet." });
  #hits = chart("hits", { unit: "% of input", format: percent, tick: wholePercent, range: [0, 1], empty: "No answer has reported its cached tokens yet." });
  #gap = chart("gap", { unit: "cost units", format: compact, tick: short, empty: NO_BOUND });
  #jain = chart("jain", { unit: "index", format: twoDigits, tick: twoDigits, range: [0, 1], empty: "No client has waited for half of a minute." });

  /** Show a frame, and the samples of the span chosen. */
  show(frame, samples) {
    this.#showTiles(frame, samples);
    const times = samples.map((sample) => sample.time);
    const values = (name) => samples.map((sample) => sample[name]);
    this.#showShares(times, samples);
    this.#requests.show(times, [
      { name: "waiting in the router", colour: "c2", values: values("queued") },
      { name: "running", colour: "c1", values: values("running") },
    ]);
    const { predicted, actual } = hitRates(samples);
    this.#hits.show(times, [
      { name: "actual", colour: "c3", values: actual },
      { name: "predicted", colour: "c5", values: predicted, dashed: true },
    ]);
    this.#gap.show(times, [
      { name: "gap", colour: "c1", values: values("gap") },
      { name: "bound", colour: "c4", values: values("bound"), dashed: true },
    ]);
    this.#jain.show(times, [{ name: "index", colour: "c1", values: values("jain") }]);
  }

  #showShares(times, samples) {
    const sums = new Map();
    for (const { shares } of samples) {
      for (const [client, share] of shares) sums.set(client, (sums.get(client) ?? 0) + share);
    }
    const first = [...sums].filter(([, sum]) => sum > 0).sort((a, b) => b[1] - a[1]).slice(0, STACKED);
    const lines = this.colours.assign(first.map(([client]) => client)).map(({ client, colour }) => ({
      name: client,
      colour,
      href: detailsHash("client", client),
      values: samples.map(({ shares }) => (shares.size ? (shares.get(client) ?? 0) : null)),
    }));
    if (sums.size > lines.length) {
      const others = samples.map(({ shares }, at) => {
        const served = [...shares.values()].some((share) => share > 0);
        return served ? Math.max(0, 1 - lines.reduce((sum, line) => sum + line.values[at], 0)) : 0;
      });
      lines.push({ name: REST, colour: "rest", values: others });
    }
    // Each area covers the lower part of the one before, so the first one is drawn up to the sum of all.
    const tops = samples.map(() => 0);
    for (const line of lines.toReversed()) {
      line.values.forEach((share, at) => (tops[at] += share ?? 0));
      line.drawn = [...tops];
    }
    this.#share.show(times, lines);
  }

  #showTiles({ fairness, totals }, samples) {
    const workers = Object.values(fairness.workers);
    const up = workers.filter((worker) => worker.healthy).length;
    const { gap, bound } = nearestGap(
      Object.fromEntries(workers.map((worker, at) => [at, worker.service_gap])),
      Object.fromEntries(workers.map((worker, at) => [at, worker.service_gap_bound])),
    );
    const hit = hitRates(samples).actual.at(-1);
    const { waits } = fairness;
    const tiles = [
      ["Jain's index", fairness.jain === null ? "–" : twoDigits(fairness.jain), fairness.jain === null ? "nobody waits long" : "of service per weight"],
      ["Clients", compact(totals.open), `with open requests, of ${compact(totals.clients)}`],
      ["Waiting", compact(totals.queued), `longest for ${seconds(waits.waiting_s)}`],
      ["Running", compact(totals.running), `at ${count(up, "worker")}`],
      ["Hit rate", percent(hit), "of input, last minute"],
      ["Gap", bound === null ? "–" : percent(gap / bound), bound === null ? "nothing bounds it" : "of its bound"],
      ["Lag", compact(fairness.service_lag), "cost units per weight, the largest"],
      ["Workers", `${up}/${workers.length}`, up === workers.length ? "answer" : `${count(workers.length - up, "worker")} down`],
    ];
    reconcile(byId("tiles"), tiles, ([name]) => name, createTile, (tile, [, value, note]) => {
      setText(tile.children[1], value);
      setText(tile.children[2], note);
    });
    byId("tiles").lastElementChild.classList.toggle("bad", up < workers.length);
  }
}

function createTile([name]) {
  return el("div", { className: "tile" }, el("span", { textContent: name }), el("b"), el("small"));
}

function chart(name, options) {
  return new Chart(byId(`${name}-chart`), byId(`${name}-legend`), options);
}
