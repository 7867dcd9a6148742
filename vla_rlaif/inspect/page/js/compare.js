// The curves of several runs over each other.
import { link } from "./api.js";
import { Grid } from "./curves.js";
import { h, note } from "./dom.js";
import { Metrics } from "./metrics.js";

const MOST = 8; // colours that can be told apart

export async function show({ params, replace, signal }) {
  const names = (params.get("runs") || "").split(",").filter((name) => name).slice(0, MOST);
  const runs = await Promise.all(names.map((name) => new Metrics(name).load(signal)));
  const grid = new Grid();
  const draw = () => grid.set(runs.map((metrics) => ({ name: metrics.run, columns: metrics.columns })));
  draw();
  replace(
    h("section.card", {}, h("h2", {}, "Runs"), h("div.legend", {}, names.map((name, place) => h("span", {}, h(`i.swatch.c${place + 1}`), h("a", { href: link("run", name) }, name))))),
    names.length ? null : note("Choose runs in the list."),
    grid.controls, grid.element);
  return {
    keys: { s: ["Smooth more", () => grid.next()] },
    async news() {
      await Promise.all(runs.map((metrics) => metrics.load(signal)));
      draw();
    },
    close: () => grid.close(),
  };
}
