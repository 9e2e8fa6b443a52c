// The tables of clients and workers, and the heat map of deficits.

import { byId, detailsLink, el, reconcile, setText } from "./dom.js";
import { compact, count, percent, seconds } from "./format.js";

const SHOWN = 20;
const TEXT_IN_CELLS = 8;

/** A table with a row for each of the items that it shows, sorted by the column whose head was clicked last. */
class Table {
  #table;
  #columns;
  #sorted;
  #onSort;

  /** A column has `title`, `value` for its order, and `fill` to show an item in a cell. `narrow` ones stay on a phone. */
  constructor(table, columns, sorted, onSort) {
    this.#table = table;
    this.#columns = columns;
    this.#sorted = { column: columns.findIndex((column) => column.title === sorted), down: true };
    this.#onSort = onSort;
    const heads = columns.map((column, index) => {
      const button = el("button", { textContent: column.title, title: column.about ?? "" });
      button.addEventListener("click", () => this.#sortBy(index));
      return el("th", { className: this.#classOf(column), scope: "col" }, button);
    });
    table.tHead.rows[0].replaceChildren(...heads);
    this.#markSorted();
  }

  /** Show the first of these items. Returns those shown. */
  show(items, limit = Infinity) {
    const { value } = this.#columns[this.#sorted.column];
    const order = this.#sorted.down ? -1 : 1;
    const first = [...items].sort((a, b) => order * compare(value(a), value(b)) || compare(a.name, b.name)).slice(0, limit);
    const create = () => el("tr", {}, ...this.#columns.map((column) => el("td", { className: this.#classOf(column) })));
    reconcile(this.#table.tBodies[0], first, (item) => item.name, create, (row, item) => {
      this.#columns.forEach((column, index) => column.fill(row.cells[index], item));
      row.className = item.className ?? "";
    });
    this.#table.hidden = first.length === 0;
    return first;
  }

  #sortBy(column) {
    this.#sorted = { column, down: this.#sorted.column === column ? !this.#sorted.down : true };
    this.#markSorted();
    this.#onSort();
  }

  #markSorted() {
    [...this.#table.tHead.rows[0].cells].forEach((head, index) => {
      const sorted = index === this.#sorted.column;
      head.setAttribute("aria-sort", sorted ? (this.#sorted.down ? "descending" : "ascending") : "none");
    });
  }

  #classOf(column) {
    return `${column.text ? "" : "number"} ${column.narrow ? "" : "wide"}`.trim();
  }
}

/** The clients: the first twenty in the order chosen, and the rest in one line; or those that a search found. */
export class Clients {
  #table;
  #colours;

  /** `colours`: of clients in the chart of shares; `onSort` is called when the order changes. */
  constructor(colours, onSort) {
    this.#colours = colours;
    this.#table = new Table(byId("clients"), this.#columns(), "Share", onSort);
  }

  /** Show the clients of a frame, or those `found` by a search, an object as in /fairness. Returns those shown. */
  show({ fairness, totals }, found) {
    const clients = Object.entries(found ?? fairness.clients).map(([name, report]) => ({ name, ...report }));
    const shown = this.#table.show(clients, SHOWN);
    const note = found ? `${count(shown.length, "client")} found, of ${compact(totals.clients)}` : countNote(shown.length, totals.clients);
    setText(byId("clients-note"), note);
    byId("clients-empty").hidden = shown.length > 0;
    setText(byId("clients-empty"), found ? "No client has this text in its name." : "No client yet. A client appears with its first call.");
    this.#showRest(found ? null : totals, shown);
    return shown;
  }

  #showRest(totals, shown) {
    const foot = byId("clients").tFoot;
    if (totals === null || totals.clients <= shown.length) {
      foot.replaceChildren();
      return;
    }
    const sum = (name) => shown.reduce((total, client) => total + (client[name] ?? 0), 0);
    const rest = {
      name: `the other ${compact(totals.clients - shown.length)}`,
      share: Math.max(0, 1 - sum("share")),
      queued: Math.max(0, totals.queued - sum("queued")),
      running: Math.max(0, totals.running - sum("running")),
    };
    const texts = { Client: rest.name, Share: percent(rest.share), Waiting: compact(rest.queued), Running: compact(rest.running) };
    const heads = [...byId("clients").tHead.rows[0].cells];
    const cells = heads.map((head) => el("td", { className: head.className, textContent: texts[head.textContent] ?? "" }));
    foot.replaceChildren(el("tr", {}, ...cells));
  }

  #columns() {
    const fillName = (cell, client) => {
      if (!cell.firstChild) cell.append(el("i", { className: "swatch" }), detailsLink("client", client.name));
      cell.firstChild.className = `swatch ${this.#colours.of(client.name)}`;
    };
    return [
      { title: "Client", text: true, narrow: true, value: (c) => c.name, fill: fillName },
      { title: "Weight", value: (c) => c.weight, fill: (cell, c) => setText(cell, compact(c.weight)) },
      { title: "Share", narrow: true, about: "Share of the cost of all service in the last minute", value: (c) => c.share ?? -1, fill: (cell, c) => fillBar(cell, c.share, percent(c.share)) },
      { title: "Waiting", narrow: true, about: "Requests in the router's queue", value: (c) => c.queued, fill: (cell, c) => setText(cell, compact(c.queued)) },
      { title: "Running", about: "Requests at workers", value: (c) => c.running, fill: (cell, c) => setText(cell, compact(c.running)) },
      { title: "Wait p50", about: "Median wait in the queue, of the last 256 requests", value: (c) => c.wait_p50_s ?? -1, fill: (cell, c) => setText(cell, seconds(c.wait_p50_s)) },
      { title: "p95", narrow: true, about: "95th percentile of the wait in the queue, of the last 256 requests", value: (c) => c.wait_p95_s ?? -1, fill: (cell, c) => setText(cell, seconds(c.wait_p95_s)) },
      { title: "Unserved", about: "For how long it has had a waiting call and been served nothing", value: (c) => c.unserved_s ?? -1, fill: (cell, c) => setText(cell, seconds(c.unserved_s)) },
      { title: "Lag", about: "How far it is behind an even share, in cost units per weight", value: (c) => c.service_lag, fill: (cell, c) => setText(cell, compact(c.service_lag)) },
    ];
  }
}

/** The workers, each with its load beside what its window allows. */
export class Workers {
  #table;

  /** `onSort` is called when the order changes. */
  constructor(onSort) {
    const ofWindow = (name) => (worker) => (worker.window ? worker[name] / worker.window[name === "running" ? "requests" : name] : -1);
    const window = (cell, worker, name, limit) =>
      fillBar(cell, worker.window ? worker[name] / limit : null, `${compact(worker[name])} / ${worker.window ? compact(limit) : "∞"}`);
    const cached = (worker) => (worker.cache?.prompt ? worker.cache.actual / worker.cache.prompt : null);
    const gap = (worker) => (worker.service_gap_bound ? worker.service_gap / worker.service_gap_bound : null);
    const fillName = (cell, worker) => {
      if (!cell.firstChild) cell.append(detailsLink("worker", worker.name));
    };
    const columns = [
      { title: "Worker", text: true, narrow: true, value: (w) => w.name, fill: fillName },
      { title: "Health", text: true, narrow: true, value: (w) => Number(w.healthy), fill: (cell, w) => fillHealth(cell, w) },
      { title: "Running", narrow: true, about: "Requests in flight / allowed by the window", value: ofWindow("running"), fill: (cell, w) => window(cell, w, "running", w.window?.requests) },
      { title: "Unstarted", about: "Uncached input tokens without a first token / allowed by the window", value: ofWindow("unstarted_tokens"), fill: (cell, w) => window(cell, w, "unstarted_tokens", w.window?.unstarted_tokens) },
      { title: "Waiting", about: "Requests that wait for it in the router; of a common pool they wait for none", value: (w) => w.queued, fill: (cell, w) => setText(cell, compact(w.queued)) },
      { title: "Cache", about: "Tokens believed to be cached / capacity of its KV cache", value: (w) => (w.cache ? w.cache.believed / w.cache.capacity : -1), fill: (cell, w) => fillBar(cell, w.cache && w.cache.believed / w.cache.capacity, w.cache ? `${compact(w.cache.believed)} / ${compact(w.cache.capacity)}` : "–") },
      { title: "Hit rate", about: "Cached share of input tokens, since it joined", value: (w) => cached(w) ?? -1, fill: (cell, w) => setText(cell, percent(cached(w))) },
      { title: "Error", about: "Mean error of the last 200 predictions, as a share of the prompt", value: (w) => w.cache?.error ?? -1, fill: (cell, w) => setText(cell, percent(w.cache?.error)) },
      { title: "Gap of bound", about: "Service gap as a share of its bound", value: (w) => gap(w) ?? -1, fill: (cell, w) => setText(cell, percent(gap(w))) },
    ];
    this.#table = new Table(byId("workers"), columns, "Running", onSort);
  }

  /** Show the workers of a frame. */
  show({ fairness }) {
    const workers = Object.entries(fairness.workers).map(([name, worker]) => ({ name, ...worker }));
    byId("workers-empty").hidden = this.#table.show(workers).length > 0;
  }
}

/** Show the deficit of each of these clients at each worker. */
export function showHeat(clients, workers) {
  const columns = heatColumns(clients, Object.keys(workers));
  const values = clients.flatMap((client) => columns.map((column) => column.of(client))).filter((value) => value !== null);
  const most = Math.max(1, ...values.map(Math.abs));
  const table = byId("heat");
  const empty = values.length === 0;
  for (const part of [table, byId("heat-scale")]) part.hidden = empty;
  byId("heat-empty").hidden = !empty;
  if (empty) return;
  const head = (column) => el("th", { scope: "col", title: column.title, textContent: column.name });
  table.tHead.rows[0].replaceChildren(el("th", { textContent: "Client" }), ...columns.map(head));
  const create = (client) => el("tr", {}, el("th", { scope: "row" }, detailsLink("client", client.name)));
  reconcile(table.tBodies[0], clients, (client) => client.name, create, (row, client) => {
    while (row.cells.length > columns.length + 1) row.lastChild.remove();
    while (row.cells.length <= columns.length) row.append(el("td"));
    columns.forEach((column, index) => fillHeat(row.cells[index + 1], column.of(client), most, `${client.name} at ${column.title}`, columns.length));
  });
  const [low, , high] = byId("heat-scale").children;
  setText(low, `−${compact(most)}`);
  setText(high, `+${compact(most)} cost units`);
}

/**
 * Return the columns of the heat map: one for each worker, with the deficit that places requests there or else the one
 * that orders them; and, where both exist, one for the order, which is then that of one pool for all workers.
 */
function heatColumns(clients, workers) {
  const placed = clients.some((client) => Object.values(client.deficit).some((deficit) => deficit.placement !== null));
  const at = (worker) => ({
    name: shortName(worker, workers),
    title: worker,
    of: (client) => client.deficit[worker]?.[placed ? "placement" : "order"] ?? null,
  });
  const order = { name: "queue", title: "the queue, which orders requests", of: (client) => Object.values(client.deficit)[0]?.order ?? null };
  const ordered = placed && clients.some((client) => order.of(client) !== null);
  return [...(ordered ? [order] : []), ...workers.map(at)];
}

/** Return the part of a worker's name in which it differs from the others. */
function shortName(name, names) {
  if (names.length < 2) return name;
  let common = 0;
  while (names.every((other) => other[common] === name[common] && common < other.length - 1)) common++;
  while (common > 0 && /[A-Za-z0-9]/.test(name[common - 1])) common--;
  return common > 0 ? name.slice(common) : name;
}

function fillHeat(cell, value, most, title, columns) {
  const level = value === null ? 0 : Math.round((100 * Math.abs(value)) / most);
  cell.className = value === null ? "none" : value < 0 ? "below" : "above";
  cell.style.setProperty("--level", `${level}%`);
  cell.title = `${title}: ${value === null ? "none" : `${compact(value)} cost units`}`;
  setText(cell, columns <= TEXT_IN_CELLS ? compact(value) : "");
}

function fillBar(cell, share, text) {
  if (!cell.firstChild) cell.append(el("span", { className: "bar" }, el("i")), el("span"));
  const level = Math.min(1, Math.max(0, share ?? 0));
  cell.firstChild.firstChild.style.width = `${100 * level}%`;
  setText(cell.lastChild, text);
}

function fillHealth(cell, worker) {
  const broken = worker.breaker !== null && worker.breaker !== "closed";
  const state = !worker.healthy ? "down" : broken ? worker.breaker : "up";
  if (!cell.firstChild) cell.append(el("span"));
  cell.firstChild.className = `health ${state === "up" ? "good" : state === "down" || state === "open" || state === "silent" ? "bad" : "fair"}`;
  setText(cell.firstChild, state);
}

function countNote(shown, all) {
  return all > shown ? `the first ${shown} of ${compact(all)}; the search finds the others` : "";
}

function compare(a, b) {
  return a < b ? -1 : a > b ? 1 : 0;
}
