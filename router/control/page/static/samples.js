// What the charts show: one sample for each frame, after those that the router took before the page was opened.

const FINE_SECONDS = 600;
const COARSE_SECONDS = 10;
const KEPT_SECONDS = 3600;
const MINUTE = 60;

/** The samples of the last hour: every frame of ten minutes, and one in ten seconds before. */
export class Samples {
  #samples = [];

  /** Begin with the router's own history. */
  begin(history) {
    this.#samples = history.map(pastSample);
  }

  /** Add a frame, and drop what is too old or too fine. */
  add(frame) {
    const sample = sampleOf(frame);
    const kept = [];
    for (const each of this.#samples) {
      const age = sample.time - each.time;
      const since = kept.length ? each.time - kept.at(-1).time : Infinity;
      if (age > 0 && age <= KEPT_SECONDS && (age <= FINE_SECONDS || since >= COARSE_SECONDS - 0.5)) kept.push(each);
    }
    this.#samples = [...kept, sample];
  }

  /** Return the samples of the last `span` seconds. */
  last(span) {
    const newest = this.#samples.at(-1)?.time ?? 0;
    return this.#samples.filter((sample) => sample.time >= newest - span);
  }
}

/** Return the predicted and the actual hit rate of the minute before each sample, null where nothing was answered. */
export function hitRates(samples) {
  const predicted = [];
  const actual = [];
  let first = 0;
  samples.forEach((sample, index) => {
    while (first < index && samples[first].time < sample.time - MINUTE) first++;
    const since = samples[Math.max(0, first - 1)].cache;
    const prompt = sample.cache.prompt - since.prompt;
    // Below 0 after a worker has left, with its counts.
    const rate = (name) => (prompt > 0 ? Math.min(1, Math.max(0, (sample.cache[name] - since[name]) / prompt)) : null);
    predicted.push(rate("predicted"));
    actual.push(rate("actual"));
  });
  return { predicted, actual };
}

/** Return the gap and the bound of the worker whose gap is nearest to its bound; nulls where nothing bounds gaps. */
export function nearestGap(gaps, bounds) {
  let nearest = { gap: null, bound: null };
  for (const [worker, bound] of Object.entries(bounds)) {
    const gap = gaps[worker];
    if (bound === null || gap === null || gap === undefined) continue;
    if (nearest.bound === null || gap / bound > nearest.gap / nearest.bound) nearest = { gap, bound };
  }
  return nearest;
}

function pastSample(sample) {
  const shares = new Map(Object.entries(sample.clients).map(([client, entry]) => [client, entry.share ?? 0]));
  const { time, jain, queued, running, cache } = sample;
  return { time, jain, queued, running, cache, shares, ...nearestGap(sample.gaps, sample.bounds) };
}

function sampleOf({ time, fairness, totals }) {
  const cache = { prompt: 0, predicted: 0, actual: 0 };
  const gaps = {};
  const bounds = {};
  for (const [name, worker] of Object.entries(fairness.workers)) {
    gaps[name] = worker.service_gap;
    bounds[name] = worker.service_gap_bound;
    for (const kind of Object.keys(cache)) cache[kind] += worker.cache?.[kind] ?? 0;
  }
  const shares = new Map(Object.entries(fairness.clients).map(([client, entry]) => [client, entry.share ?? 0]));
  const { jain } = fairness;
  return { time, jain, queued: totals.queued, running: totals.running, cache, shares, ...nearestGap(gaps, bounds) };
}
