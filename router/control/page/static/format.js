// Numbers as text. A value that is not known is a dash.

const UNKNOWN = "–";
const SUFFIXES = [[1e9, "G"], [1e6, "M"], [1e3, "k"]];

/** Return a number with three digits or fewer and a suffix: 12345 is 12.3k. */
export function compact(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return UNKNOWN;
  const size = Math.abs(value);
  for (const [unit, suffix] of SUFFIXES) {
    if (size >= unit * 0.9995) return sign(digits(size / unit) + suffix, value);
  }
  return sign(Number.isInteger(value) ? String(size) : digits(size), value);
}

/** Return a round number with a suffix and no digits that say nothing: 1500000 is 1.5M. */
export function short(value) {
  return compact(value).replace(/\.?0+(?=[kMG]?$)(?<=\..*)/, "");
}

/** Return an index with two digits after the point. */
export function twoDigits(value) {
  return value.toFixed(2);
}

/** Return a share as a whole percentage. */
export function wholePercent(share) {
  return `${Math.round(100 * share)} %`;
}

/** Return a share as a percentage. */
export function percent(share) {
  if (share === null || share === undefined || Number.isNaN(share)) return UNKNOWN;
  const value = 100 * share;
  return `${value >= 99.95 || value === 0 ? value.toFixed(0) : value.toFixed(1)} %`;
}

/** Return a duration with its unit. */
export function seconds(value) {
  if (value === null || value === undefined) return UNKNOWN;
  if (value === 0) return "0 s";
  if (value < 0.0995) return `${digits(1000 * value)} ms`;
  if (value < 120) return `${digits(value)} s`;
  return value < 7200 ? `${digits(value / 60)} min` : `${digits(value / 3600)} h`;
}

/** Return the local time of day of a time in seconds since 1970. */
export function clock(time) {
  return new Date(1000 * time).toLocaleTimeString("en-GB");
}

/** Return a count with its noun in singular or plural. */
export function count(value, noun) {
  return `${compact(value)} ${noun}${value === 1 ? "" : "s"}`;
}

function digits(value) {
  return value >= 99.95 ? value.toFixed(0) : value >= 9.995 ? value.toFixed(1) : value.toFixed(2);
}

function sign(text, value) {
  return value < 0 ? `−${text}` : text;
}
