// Numbers, times and names as people read them.

const MINUS = "\u2212";
export const NOTHING = "\u2013";

/** Three significant digits, without a needless exponent. */
export function num(value, digits = 3) {
  if (value === null || value === undefined) return NOTHING;
  if (value === 0) return "0";
  const size = Math.abs(value);
  let text;
  if (Number.isInteger(value) && size < 1e6) text = String(size);
  else if (size >= 1e6 || size < 1e-3) text = size.toExponential(Math.max(0, digits - 2)).replace("e+", "e").replace("-", MINUS);
  else text = size >= 100 ? size.toFixed(size >= 1000 ? 0 : 1) : size.toPrecision(digits);
  return (value < 0 ? MINUS : "") + text;
}

export function signed(value, digits = 2) {
  if (value === null || value === undefined) return NOTHING;
  return (value < 0 ? MINUS : "+") + Math.abs(value).toFixed(digits);
}

export function percent(value, digits = 0) {
  return value === null || value === undefined ? NOTHING : `${(100 * value).toFixed(digits)} %`;
}

export function minutes(value) {
  if (value === null || value === undefined) return NOTHING;
  if (value < 1.5) return `${Math.round(60 * value)} s`;
  return value < 90 ? `${value.toFixed(value < 10 ? 1 : 0)} min` : `${(value / 60).toFixed(1)} h`;
}

/** How long ago, by the server's clock. */
export function ago(seconds) {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h ago` : `${Math.round(seconds / 86400)} days ago`;
}

export function outcome(success) {
  return success === 1 ? "success" : success === 0 ? "failure" : "unknown";
}

const ORIGINS = { train: "training", before: "test, before", after: "test, after", data: "dataset" };
export const origin = (name) => ORIGINS[name] || name;

export function plural(count, one, many = `${one}s`) {
  return `${count.toLocaleString("en")} ${count === 1 ? one : many}`;
}
