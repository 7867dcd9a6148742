// A line chart: axes with units, a legend with the values under the pointer, a cursor that a player may move.
import { h, replace, svg } from "./dom.js";
import { num, percent } from "./format.js";
import { rangeOf, smoothed, thinned, tickLabels, ticks } from "./scale.js";

const ROOM = { left: 46, right: 10, top: 6, bottom: 30 };

/**
 * spec: title, unit, help, xLabel, percent (values are shares), fixed ([low, high] of y, null is free), height, zero.
 * Series by `set`: [{name, x: [], y: [], color: 1..8, dots, band: [low[], high[]], right: on an axis of its own}].
 */
export class Chart {
  constructor(spec) {
    this.spec = { height: 168, fixed: [null, null], xLabel: "step", whole: true, ...spec };
    this.series = [];
    this.smooth = 1;
    this.cursor = null;
    this.hover = null;
    this.drawing = svg("svg", { role: "img", height: this.spec.height });
    this.legend = h("div.legend");
    this.element = h("figure.chart", {},
      h("figcaption", {}, h("h3", {}, this.spec.title), this.spec.unit ? h("span.unit", {}, this.spec.unit) : null,
        this.spec.help ? h("span.help", {}, this.spec.help) : null),
      this.drawing, this.legend);
    this.drawing.addEventListener("pointermove", (event) => this.point(event));
    this.drawing.addEventListener("pointerdown", (event) => {
      this.point(event);
      if (this.spec.onpick && this.hover !== null) this.spec.onpick(this.hover);
    });
    this.drawing.addEventListener("pointerleave", () => this.leave());
    // Its own legend may wrap and change its height: only another width is a reason to draw.
    this.watcher = new ResizeObserver(() => this.drawing.clientWidth !== this.width && this.draw());
    this.watcher.observe(this.element);
  }

  set(series) {
    this.series = series;
    this.draw();
  }

  setSmooth(width) {
    this.smooth = width;
    this.draw();
  }

  setCursor(x) {
    this.cursor = x;
    if (this.cursorLine && this.toX) {
      const at = this.toX(Math.max(this.rangeX()[0], Math.min(this.rangeX()[1], x))); // clips may be longer than the line
      this.cursorLine.setAttribute("x1", at);
      this.cursorLine.setAttribute("x2", at);
    }
    if (this.hover === null) this.tell(x);
  }

  close() {
    this.watcher.disconnect();
  }

  draw() {
    const width = this.drawing.clientWidth || this.element.clientWidth;
    this.width = this.drawing.clientWidth;
    if (!width) return;
    const { height } = this.spec;
    this.drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const shown = this.series.map((one) => ({ ...one, soft: smoothed(one.y, one.dots ? 1 : this.smooth) }));
    const [x0, x1] = this.rangeX();
    const isRight = (one) => Boolean(one.right);
    const range = (some, fixed) => rangeOf(some.flatMap((one) => [...one.soft, ...(one.band || []).flat()]), fixed);
    const ys = range(shown.filter((one) => !isRight(one)), this.spec.fixed);
    const others = shown.some(isRight) ? range(shown.filter(isRight), [null, null]) : null;
    const right = width - (others ? ROOM.left : ROOM.right);
    this.toX = (x) => ROOM.left + ((x - x0) / (x1 - x0 || 1)) * (right - ROOM.left);
    this.fromX = (px) => x0 + ((px - ROOM.left) / (right - ROOM.left)) * (x1 - x0);
    const scale = ([y0, y1]) => (y) => ROOM.top + ((y1 - y) / (y1 - y0)) * (height - ROOM.top - ROOM.bottom);
    this.toY = scale(ys);
    replace(this.drawing, this.axes(right, height, [x0, x1], ys), others ? this.rightAxis(right, others, scale(others)) : null,
      shown.map((one) => this.line(one, isRight(one) ? scale(others) : this.toY)));
    this.cross = svg("line.cross", { y1: ROOM.top, y2: height - ROOM.bottom, visibility: "hidden" });
    this.cursorLine = this.cursor === null ? null : svg("line.cursor", { y1: ROOM.top, y2: height - ROOM.bottom });
    this.drawing.append(this.cross);
    if (this.cursorLine) this.drawing.append(this.cursorLine);
    this.drawing.setAttribute("aria-label", this.words());
    if (this.cursor !== null) this.setCursor(this.cursor);
    if (this.hover !== null) this.showHover();
    else if (this.cursor === null) this.tell(null);
  }

  rangeX() {
    const all = this.series.flatMap((one) => one.x);
    if (!all.length) return [0, 1];
    const [low, high] = all.reduce(([least, most], x) => [Math.min(least, x), Math.max(most, x)], [Infinity, -Infinity]);
    return low === high ? [low - 0.5, high + 0.5] : [low, high];
  }

  axes(right, height, [x0, x1], [y0, y1]) {
    const bottom = height - ROOM.bottom;
    const parts = [];
    const upward = ticks(y0, y1, Math.max(2, Math.floor(height / 42)));
    tickLabels(upward, { isPercent: this.spec.percent }).forEach((label, k) => {
      const y = this.toY(upward[k]);
      parts.push(svg("line.grid", { x1: ROOM.left, x2: right, y1: y, y2: y }));
      parts.push(svg("text", { x: ROOM.left - 6, y: y + 4, "text-anchor": "end" }, label));
    });
    const across = ticks(x0, x1, Math.max(2, Math.floor(right / 90))).filter((x) => !this.spec.whole || Number.isInteger(x));
    tickLabels(across).forEach((label, k) => {
      const x = this.toX(across[k]);
      const isLast = x > right - 14;
      parts.push(svg("line.axis", { x1: x, x2: x, y1: bottom, y2: bottom + 3 }));
      parts.push(svg("text", { x: isLast ? right : x, y: bottom + 14, "text-anchor": isLast ? "end" : "middle" }, label));
    });
    parts.push(svg("line.axis", { x1: ROOM.left, x2: right, y1: bottom, y2: bottom }));
    parts.push(svg("text", { x: (ROOM.left + right) / 2, y: height - 3, "text-anchor": "middle" }, this.spec.xLabel));
    for (const value of this.spec.lines || []) {
      if (value > y0 && value < y1) parts.push(svg("line.refline", { x1: ROOM.left, x2: right, y1: this.toY(value), y2: this.toY(value) }));
    }
    return parts;
  }

  rightAxis(right, [y0, y1], toY) {
    const upward = ticks(y0, y1, Math.max(2, Math.floor(this.spec.height / 42)));
    return tickLabels(upward).map((label, k) => svg("text.right", { x: right + 6, y: toY(upward[k]) + 4 }, label));
  }

  line(one, toY) {
    const color = `c${one.color}`;
    const parts = [];
    if (one.dots) {
      one.y.forEach((y, k) => {
        if (y === null || y === undefined) return;
        const x = this.toX(one.x[k]);
        if (one.band) parts.push(svg(`line.${color}`, { x1: x, x2: x, y1: toY(one.band[0][k]), y2: toY(one.band[1][k]), opacity: 0.5 }));
        parts.push(svg(`circle.dot.${color}`, { cx: x, cy: toY(y), r: 3 }));
      });
      return parts;
    }
    if (this.smooth > 1) parts.push(svg(`path.line.faint.${color}`, { d: this.path(one.x, one.y, toY) }));
    parts.push(svg(`path.line.${color}`, { d: this.path(one.x, one.soft, toY), "stroke-dasharray": one.dashed ? "2 4" : null }));
    if (one.dashed) return parts;
    const known = one.soft.filter((y) => y !== null && y !== undefined).length;
    if (known <= 12) {
      one.soft.forEach((y, k) => {
        if (y !== null && y !== undefined) parts.push(svg(`circle.dot.${color}`, { cx: this.toX(one.x[k]), cy: toY(y), r: 2.6 }));
      });
    }
    return parts;
  }

  path(x, y, toY) {
    let text = "";
    let isDown = false;
    for (const k of thinned(y)) {
      if (y[k] === null || y[k] === undefined) {
        isDown = isDown && !this.spec.gaps;
        continue;
      }
      text += `${isDown ? "L" : "M"}${this.toX(x[k]).toFixed(1)} ${toY(y[k]).toFixed(1)}`;
      isDown = true;
    }
    return text;
  }

  point(event) {
    if (!this.fromX) return;
    const box = this.drawing.getBoundingClientRect();
    const places = this.series.flatMap((one) => one.x);
    const wanted = this.fromX(event.clientX - box.left);
    this.hover = places.reduce((best, x) => (best === null || Math.abs(x - wanted) < Math.abs(best - wanted) ? x : best), null);
    if (this.hover !== null) this.showHover();
  }

  showHover() {
    this.cross.setAttribute("x1", this.toX(this.hover));
    this.cross.setAttribute("x2", this.toX(this.hover));
    this.cross.setAttribute("visibility", "visible");
    this.tell(this.hover);
  }

  leave() {
    this.hover = null;
    if (this.cross) this.cross.setAttribute("visibility", "hidden");
    this.tell(this.cursor);
  }

  /** The legend: values at x, or the newest ones. */
  tell(x) {
    const say = this.spec.percent ? (value) => percent(value, 1) : (value) => num(value);
    replace(this.legend,
      x === null || x === undefined ? null : h("span", {}, `${this.spec.xLabel} `, h("b", {}, num(x))),
      this.series.map((one) => h("span", {}, h(`i.swatch.c${one.color}`), `${one.name} `, h("b", {}, say(valueAt(one, x))))));
  }

  words() {
    const say = this.spec.percent ? (value) => percent(value, 1) : (value) => num(value);
    return `${this.spec.title}. ${this.series.map((one) => `${one.name}: ${say(valueAt(one, null))}`).join(", ")}`;
  }
}

function valueAt(one, x) {
  if (x === null || x === undefined) return one.y.findLast((y) => y !== null && y !== undefined);
  const place = one.x.indexOf(x);
  if (place >= 0) return one.y[place];
  const before = one.x.findLastIndex((other) => other <= x);
  return before < 0 ? null : one.y[before];
}

/** A small line without axes, as SVG. */
export function spark(values) {
  if (values.length < 2) return null;
  const [low, high] = [Math.min(...values, 0), Math.max(...values, 1)];
  const points = values.map((y, k) => `${(1 + (90 * k) / (values.length - 1)).toFixed(1)},${(20 - (18 * (y - low)) / (high - low)).toFixed(1)}`);
  return svg("svg.spark", { viewBox: "0 0 92 22", "aria-hidden": "true" }, svg("polyline", { points: points.join(" ") }));
}
