// The charts over time, drawn by uPlot.

import uPlot from "./uplot/uPlot.esm.js";
import { el, reconcile, setText } from "./dom.js";
import { clock } from "./format.js";

const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000];
const FONT = "11px system-ui, sans-serif";

/** Return a colour of the style sheet, as it is in the light or dark scheme in force. */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** One chart with a legend of its own, whose entries have the values at the cursor, or else the newest. */
export class Chart {
  #place;
  #legend;
  #options;
  #plot = null;
  #lines = [];
  #data = [[]];

  /**
   * `place` and `legend`: elements. `options`: `unit` labels the axis; `format` writes a value, and `tick` one at the
   * axis; `range` is the fixed range of values; `whole` allows whole numbers only at the axis; `area` fills the lines
   * down to 0; `height` is in pixels; `empty` is shown while nothing is known.
   */
  constructor(place, legend, options) {
    this.#place = place;
    this.#legend = legend;
    this.#options = { height: 150, ...options };
    this.#place.dataset.empty = options.empty;
    new ResizeObserver(() => this.#resize()).observe(place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#rebuild());
  }

  /**
   * Show lines over these times. A line has `name`, `colour` (of the style sheet), `values` for the legend, and
   * `drawn`, what is drawn, if that is something else; `href` makes its entry a link.
   */
  show(times, lines) {
    const known = lines.some((line) => line.values.some((value) => value !== null));
    this.#place.classList.toggle("nothing", !known);
    this.#data = known ? [times, ...lines.map((line) => line.drawn ?? line.values)] : [[]];
    const same = lines.length === this.#lines.length && lines.every((line, i) => line.colour === this.#lines[i].colour);
    this.#lines = lines;
    if (!same || this.#plot === null || !known) this.#rebuild();
    else this.#plot.setData(this.#data);
    this.#showLegend(this.#plot?.cursor.idx);
  }

  #rebuild() {
    this.#plot?.destroy();
    this.#plot = null;
    if (this.#data.length > 1) this.#plot = new uPlot(this.#uplotOptions(), this.#data, this.#place);
  }

  #resize() {
    const width = this.#place.clientWidth;
    if (this.#plot !== null && width > 0 && width !== this.#plot.width) {
      this.#plot.setSize({ width, height: this.#options.height });
    }
  }

  #uplotOptions() {
    const { unit, tick, range, height, area } = this.#options;
    const axis = { stroke: colour("muted"), font: FONT, labelFont: FONT, grid: { stroke: colour("grid"), width: 1 } };
    return {
      width: Math.max(200, this.#place.clientWidth),
      height,
      legend: { show: false },
      cursor: { y: false, points: { show: !area }, drag: { x: false, y: false } },
      padding: [8, 32, 0, 0], // half a label of the time axis beyond its end
      scales: { y: { range: range ?? ((_, __, most) => [0, most > 0 ? 1.1 * most : 1]) } },
      axes: [
        { ...axis, ticks: { show: false }, space: 64, size: 28, values: (_, splits) => splits.map(clock) },
        {
          ...axis,
          ticks: { show: false },
          label: unit,
          labelSize: 18,
          labelGap: 2,
          size: 46,
          values: (_, splits) => splits.map(tick),
          ...(this.#options.whole ? { incrs: WHOLE } : {}),
        },
      ],
      series: [
        {},
        ...this.#lines.map((line) => ({
          stroke: area ? colour("surface") : colour(line.colour),
          fill: area ? colour(line.colour) : undefined,
          width: area ? 0.5 : 1.75,
          dash: line.dashed ? [5, 4] : undefined,
          points: { show: false },
          spanGaps: false,
        })),
      ],
      hooks: { setCursor: [(plot) => this.#showLegend(plot.cursor.idx)] },
    };
  }

  #showLegend(index) {
    const create = (line) => {
      const text = line.href ? el("a", { className: "name" }) : el("span", { className: "name" });
      return el("li", {}, el("i"), text, el("b"));
    };
    reconcile(this.#legend, this.#lines, (line) => line.name, create, (item, line) => {
      const [swatch, name, value] = item.children;
      swatch.className = `swatch ${line.colour}${line.dashed ? " dashed" : ""}`;
      if (line.href) name.href = line.href;
      name.title = line.name;
      setText(name, line.name);
      const at = line.values[index ?? line.values.length - 1];
      setText(value, at === null || at === undefined ? "–" : this.#options.format(at));
    });
  }
}
