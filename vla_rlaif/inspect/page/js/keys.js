// One table of keys for what is shown; "?" lists them. Fields and open dialogs keep theirs.
import { h, replace } from "./dom.js";

const NAMES = { " ": "Space", ArrowUp: "\u2191", ArrowDown: "\u2193", ArrowLeft: "\u2190", ArrowRight: "\u2192", Escape: "Esc" };
let keys = {}; // key -> [what it does, function]

export function setKeys(table) {
  keys = table;
}

export function listenToKeys() {
  const dialog = document.getElementById("keys");
  document.getElementById("help").addEventListener("click", () => list(dialog));
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || dialog.open) return;
    if (isField(event.target)) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (event.key === "?") return list(dialog);
    const isButton = event.target.closest("button, a, summary") !== null;
    if (event.key === " " && isButton) return; // it presses the button
    const found = keys[event.key];
    if (!found) return;
    event.preventDefault();
    found[1](event);
  });
}

function isField(element) {
  return element.matches("input:not([type=checkbox], [type=radio], [type=range]), select, textarea");
}

function list(dialog) {
  const rows = Object.entries({ ...keys, "?": ["This list"] });
  replace(document.getElementById("key-list"), rows.map(([key, [text]]) => [h("dt", {}, h("kbd", {}, NAMES[key] || key)), h("dd", {}, text)]));
  dialog.showModal();
}

/** Up and down through the rows of a table; each has a link. */
export function rowKeys(table) {
  const move = (by) => {
    const links = [...table().querySelectorAll("tbody tr a.open")];
    if (!links.length) return;
    const now = links.indexOf(document.activeElement);
    links[Math.max(0, Math.min(links.length - 1, now < 0 ? 0 : now + by))].focus();
  };
  return { ArrowDown: ["Next row", () => move(1)], ArrowUp: ["Row before", () => move(-1)] };
}
