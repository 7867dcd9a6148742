// The metrics of a run, kept and added to while it goes on.
import { ask } from "./api.js";

export class Metrics {
  constructor(run) {
    [this.run, this.epoch, this.num, this.columns] = [run, -1, 0, {}];
  }

  /** Read what is new. The columns are added to in place, or new ones if the run has gone back. */
  async load(signal) {
    const part = await ask("metrics", { run: this.run, epoch: this.epoch, first: this.num }, { signal });
    if (part.epoch !== this.epoch) this.columns = {};
    for (const name of new Set([...Object.keys(part.columns), ...Object.keys(this.columns)])) {
      const column = (this.columns[name] ||= Array(part.first).fill(null));
      const news = part.columns[name] || [];
      for (let k = 0; k < part.num - part.first; k++) column[part.first + k] = news[k] ?? null;
      column.length = part.num;
    }
    [this.epoch, this.num] = [part.epoch, part.num];
    return this;
  }

  last(name) {
    return (this.columns[name] || []).findLast((value) => value !== null);
  }
}
