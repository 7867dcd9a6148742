// Amounts on top of each other over steps or time: phases of a step, GPUs of roles.
import { h, replace, svg } from "./dom.js";
import { num } from "./format.js";
import { tickLabels, ticks } from "./scale.js";

const ROOM = { left: 46, right: 10, top: 6, bottom: 30 };

/** layers: [{name, color, values}], x: left ends and one right end more than values. */
export class Stack {
  constructor({ title, unit, xLabel, help = null, height = 200 }) {
    Object.assign(this, { title, unit, xLabel, height, x: [], layers: [] });
    this.drawing = svg("svg", { role: "img", height, "aria-label": title });
    this.legend = h("div.legend");
    this.element = h("figure.chart", {}, h("figcaption", {}, h("h3", {}, title), h("span.unit", {}, unit), help ? h("span.help", {}, help) : null), this.drawing, this.legend);
    this.watcher = new ResizeObserver(() => this.draw());
    this.watcher.observe(this.element);
    this.drawing.addEventListener("pointermove", (event) => this.tell(this.placeAt(event)));
    this.drawing.addEventListener("pointerleave", () => this.tell(null));
  }

  set(x, layers) {
    [this.x, this.layers] = [x, layers];
    this.draw();
  }

  draw() {
    const width = this.drawing.clientWidth;
    if (!width || this.x.length < 2) return;
    const bottom = this.height - ROOM.bottom;
    const right = width - ROOM.right;
    const [x0, x1] = [this.x[0], this.x[this.x.length - 1]];
    const totals = this.x.slice(1).map((_, k) => this.layers.reduce((sum, layer) => sum + (layer.values[k] || 0), 0));
    const top = Math.max(...totals, 1e-9) * 1.05;
    this.toX = (x) => ROOM.left + ((x - x0) / (x1 - x0)) * (right - ROOM.left);
    const toY = (y) => bottom - (y / top) * (bottom - ROOM.top);
    this.drawing.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    const parts = [];
    const upward = ticks(0, top, 4);
    tickLabels(upward).forEach((label, k) => parts.push(
      svg("line.grid", { x1: ROOM.left, x2: right, y1: toY(upward[k]), y2: toY(upward[k]) }),
      svg("text", { x: ROOM.left - 6, y: toY(upward[k]) + 4, "text-anchor": "end" }, label)));
    const under = totals.map(() => 0);
    for (const layer of this.layers) {
      const group = svg(`g.c${layer.color}`, { stroke: "none" });
      layer.values.forEach((value, k) => {
        if (!value) return;
        const [left, end] = [this.toX(this.x[k]), this.toX(this.x[k + 1])];
        group.append(svg(`rect.c${layer.color}`, { x: left, width: Math.max(0.6, end - left - (end - left > 5 ? 1 : 0)), y: toY(under[k] + value), height: Math.max(0, toY(under[k]) - toY(under[k] + value)) }));
        under[k] += value;
      });
      parts.push(group);
    }
    const across = ticks(x0, x1, Math.max(2, Math.floor(width / 90)));
    tickLabels(across).forEach((label, k) => parts.push(svg("text", { x: this.toX(across[k]), y: bottom + 14, "text-anchor": across[k] > x1 - (x1 - x0) * 0.02 ? "end" : "middle" }, label)));
    parts.push(svg("line.axis", { x1: ROOM.left, x2: right, y1: bottom, y2: bottom }), svg("text", { x: (ROOM.left + right) / 2, y: this.height - 3, "text-anchor": "middle" }, this.xLabel));
    replace(this.drawing, parts);
    this.tell(null);
  }

  placeAt(event) {
    if (!this.toX) return null;
    const at = event.clientX - this.drawing.getBoundingClientRect().left;
    const place = this.x.findIndex((x, k) => k + 1 < this.x.length && at < this.toX(this.x[k + 1]));
    return place < 0 ? this.x.length - 2 : place;
  }

  /** The legend: values at a place, or sums over all (means, where `this.isMean`). */
  tell(place) {
    const value = (layer) => {
      if (place !== null) return layer.values[place] || 0;
      const total = layer.values.reduce((sum, one) => sum + (one || 0), 0);
      return total / (layer.values.length || 1);
    };
    replace(this.legend, h("span", {}, place === null ? "mean" : `${this.xLabel} ${num(this.x[place])}`),
      this.layers.map((layer) => h("span", {}, h(`i.swatch.block.c${layer.color}`), `${layer.name} `, h("b", {}, num(value(layer))))));
  }

  close() {
    this.watcher.disconnect();
  }
}
