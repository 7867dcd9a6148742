// Ticks and ranges of axes.

/** At most `wanted` round values inside [low, high]. */
export function ticks(low, high, wanted = 5) {
  const rough = (high - low) / Math.max(1, wanted);
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((k) => k * power).find((size) => size >= rough * 0.999);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(k * step);
  return found;
}

/** The range of all numbers, a little wider, and never empty. `fixed` is [low, high], either may be null. */
export function rangeOf(values, fixed = [null, null]) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value === null || value === undefined) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) [low, high] = [0, 1];
  if (low === high) {
    const room = Math.abs(low) * 0.1 || 0.5;
    [low, high] = [low - room, high + room];
  }
  const room = (high - low) * 0.05;
  return [fixed[0] === null ? low - room : Math.min(fixed[0], low), fixed[1] === null ? high + room : Math.max(fixed[1], high)];
}

/** Labels for ticks: all with as many decimals as they need to differ. */
export function tickLabels(values, { isPercent = false } = {}) {
  const scaled = isPercent ? values.map((value) => 100 * value) : values;
  const step = scaled.length > 1 ? Math.abs(scaled[1] - scaled[0]) : Math.abs(scaled[0]) || 1;
  const biggest = Math.max(...scaled.map(Math.abs));
  if (biggest >= 1e6 || (biggest > 0 && biggest < 1e-3)) return scaled.map((value) => (value === 0 ? "0" : value.toExponential(1).replace("e+", "e")));
  const decimals = Math.max(0, Math.min(6, -Math.floor(Math.log10(step) + 1e-9)));
  return scaled.map((value) => `${value.toFixed(decimals).replace("-", "\u2212")}${isPercent ? " %" : ""}`);
}

/** Mean of the last `width` known values at each place; null stays null. */
export function smoothed(values, width) {
  if (width <= 1) return values;
  const recent = [];
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    recent.push(value);
    if (recent.length > width) recent.shift();
    return recent.reduce((sum, one) => sum + one, 0) / recent.length;
  });
}

/** Places of at most `most` values that keep the extremes of each stretch, for drawing. */
export function thinned(values, most = 1200) {
  if (values.length <= most) return values.map((_, place) => place);
  const size = Math.ceil(values.length / (most / 2));
  const kept = new Set([0, values.length - 1]);
  for (let first = 0; first < values.length; first += size) {
    let low = null;
    let high = null;
    for (let k = first; k < Math.min(first + size, values.length); k++) {
      if (values[k] === null || values[k] === undefined) continue;
      if (low === null || values[k] < values[low]) low = k;
      if (high === null || values[k] > values[high]) high = k;
    }
    if (low !== null) kept.add(low).add(high);
  }
  return [...kept].sort((a, b) => a - b);
}
