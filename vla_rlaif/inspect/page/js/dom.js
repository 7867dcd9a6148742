// Elements from JavaScript, without inline styles or scripts, which the page's content security policy forbids.

/** h("a.quiet", {href, onclick}, child, ...): children may be texts, elements, null, or lists of these. */
export function h(what, given, ...children) {
  const [tag, ...classes] = what.split(".");
  return fill(document.createElement(tag || "div"), classes, given, children);
}

/** The same for SVG. */
export function svg(what, given, ...children) {
  const [tag, ...classes] = what.split(".");
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), classes, given, children);
}

function fill(element, classes, given, children) {
  for (const name of classes) element.classList.add(name);
  for (const [name, value] of Object.entries(given || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children) {
    if (Array.isArray(child)) append(element, child);
    else if (child !== null && child !== undefined && child !== false) element.append(child);
  }
}

export function replace(element, ...children) {
  element.replaceChildren();
  append(element, children);
}

/** A list of terms: pairs of a name and a value or an element; values that are null are left out. */
export function facts(pairs) {
  const known = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h("dl.facts", {}, known.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

/** Large figures; each {name, value, more}. */
export function figures(list) {
  const known = list.filter((one) => one.value !== null && one.value !== undefined);
  return h("dl.figures", {}, known.map((one) =>
    h("div", {}, h("dt", {}, one.name), h("dd", {}, one.value, one.more ? h("small", {}, one.more) : null))));
}

export function note(text) {
  return h("p.note", {}, text);
}

export function problem(text) {
  return h("p.problem", { role: "alert" }, text);
}

/** A bar from 0 to `share` of its width; `split`: from the middle to either side, share in [-1, 1]. */
export function bar(share, { split = false } = {}) {
  const fillBar = h("i");
  const size = Math.min(1, Math.abs(share || 0));
  if (split) {
    fillBar.classList.add(share >= 0 ? "plus" : "minus");
    fillBar.style.setProperty("left", `${share >= 0 ? 50 : 50 - 50 * size}%`);
    fillBar.style.setProperty("width", `${50 * size}%`);
  } else {
    fillBar.style.setProperty("left", "0");
    fillBar.style.setProperty("width", `${100 * size}%`);
  }
  return h(`span.bar${split ? ".split" : ""}`, { "aria-hidden": "true" }, fillBar);
}
