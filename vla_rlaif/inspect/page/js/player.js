// Clips side by side that play in step. A clip is one picture that holds all frames (local_page/sheets.py).
import { address } from "./api.js";
import { h, replace } from "./dom.js";

const FPS = 5; // frames a second at speed 1; there is one a decision
const HOLD_S = 1.2; // on the last frame, so that the outcome can be seen
const SPEEDS = [0.25, 0.5, 1, 2, 4];
const KEPT = 128; // pictures
const still = matchMedia("(prefers-reduced-motion: reduce)");
const pictures = new Map(); // address -> promise

function pictureOf(where) {
  if (!pictures.has(where)) {
    if (pictures.size >= KEPT) pictures.delete(pictures.keys().next().value);
    const load = new Promise((done, fail) => {
      const image = new Image();
      image.onload = () => done(image);
      image.onerror = () => fail(new Error("This clip cannot be read."));
      image.src = where;
    });
    load.catch(() => pictures.delete(where));
    pictures.set(where, load);
  }
  return pictures.get(where);
}

/** One camera of one episode on a canvas. */
class View {
  constructor(run, episode, camera) {
    [this.episode, this.size] = [episode, episode.cameras[camera]];
    this.frame = -1;
    this.canvas = h("canvas", { width: this.size[1], height: this.size[0], role: "img", "aria-label": `${camera} of episode ${episode.id}` });
    if (Math.max(...this.size) <= 128) this.canvas.classList.add("pixels");
    this.element = h("div", {}, this.canvas, Object.keys(episode.cameras).length > 1 ? h("div.camera", {}, camera) : null);
    this.ready = pictureOf(address("sheet", { run, id: episode.id, camera })).then(
      (image) => {
        this.image = image;
        if (this.frame >= 0) this.draw(this.frame);
      },
      (error) => replace(this.element, h("p.problem", {}, error.message)),
    );
  }

  draw(frame) {
    this.frame = Math.min(frame, this.episode.frames - 1);
    if (!this.image) return;
    const [height, width] = this.size;
    const column = this.frame % this.episode.columns;
    const line = Math.floor(this.frame / this.episode.columns);
    this.canvas.getContext("2d").drawImage(this.image, column * width, line * height, width, height, 0, 0, width, height);
  }
}

/** `clips()`: an element for each episode; `transport`: the controls; `onframe` hears of every frame that is shown. */
export class Player {
  constructor(run, episodes, { onframe = () => {} } = {}) {
    [this.run, this.episodes, this.onframe] = [run, episodes, onframe];
    this.frames = Math.max(1, ...episodes.map((episode) => episode.frames));
    this.frame = 0;
    this.speed = 2;
    this.isLoop = true;
    this.request = 0;
    this.views = [];
    this.elements = [];
    this.build();
    this.seek(still.matches ? this.frames - 1 : 0);
    if (!still.matches) this.play();
  }

  /** The cameras of an episode. */
  cameras(episode) {
    const views = Object.keys(episode.cameras).map((camera) => new View(this.run, episode, camera));
    this.views.push(...views);
    for (const view of views) view.draw(Math.floor(this.frame));
    return h("div.views", {}, views.map((view) => view.element));
  }

  /** Tells an element of an episode when its clip is over and the others go on. */
  follow(element, episode) {
    this.elements.push([element, episode]);
    return element;
  }

  get ready() {
    return Promise.all(this.views.map((view) => view.ready));
  }

  build() {
    this.button = h("button.play", { type: "button", onclick: () => this.toggle() }, "Play");
    this.scrub = h("input", { type: "range", min: 0, max: this.frames - 1, value: 0, "aria-label": "Frame", oninput: () => { this.pause(); this.seek(Number(this.scrub.value)); } });
    this.where = h("span.frame.number.small.muted");
    this.speeds = h("select", { "aria-label": "Speed", onchange: () => this.setSpeed(Number(this.speeds.value)) },
      SPEEDS.map((speed) => h("option", { value: speed, selected: speed === this.speed }, `${speed}\u00d7`)));
    this.loop = h("input", { type: "checkbox", checked: true, onchange: () => { this.isLoop = this.loop.checked; } });
    this.transport = h("div.transport", { role: "group", "aria-label": "Playing" },
      this.button, this.scrub, this.where, this.speeds, h("label", {}, this.loop, "loop"));
  }

  seek(frame) {
    this.frame = Math.max(0, Math.min(this.frames - 1, frame));
    const shown = Math.floor(this.frame);
    for (const view of this.views) view.draw(shown);
    for (const [element, episode] of this.elements) element.classList.toggle("over", shown > episode.frames - 1);
    this.scrub.value = shown;
    this.where.textContent = `${shown + 1} of ${this.frames}`;
    this.onframe(shown);
  }

  play() {
    if (this.frames < 2 || this.request) return;
    if (this.frame >= this.frames - 1) this.seek(0);
    this.button.textContent = "Pause";
    this.since = performance.now();
    this.held = 0;
    const tick = (now) => {
      const passed = (now - this.since) / 1000;
      this.since = now;
      if (this.frame < this.frames - 1) this.advance(this.frame + passed * FPS * this.speed);
      else if ((this.held += passed) > HOLD_S) {
        this.held = 0;
        if (!this.isLoop) return this.pause();
        this.seek(0);
      }
      this.request = requestAnimationFrame(tick);
    };
    this.request = requestAnimationFrame(tick);
  }

  advance(frame) {
    if (Math.floor(frame) === Math.floor(this.frame)) this.frame = frame;
    else this.seek(frame);
  }

  pause() {
    cancelAnimationFrame(this.request);
    this.request = 0;
    this.button.textContent = "Play";
  }

  toggle() {
    if (this.request) this.pause();
    else this.play();
  }

  step(by) {
    this.pause();
    this.seek(Math.floor(this.frame) + by);
  }

  setSpeed(speed) {
    this.speed = speed;
    this.speeds.value = String(speed);
  }

  faster(by) {
    this.setSpeed(SPEEDS[Math.max(0, Math.min(SPEEDS.length - 1, SPEEDS.indexOf(this.speed) + by))]);
  }

  close() {
    this.pause();
  }

  get keys() {
    return {
      " ": ["Play or pause", () => this.toggle()],
      ",": ["Frame back", () => this.step(-1)],
      ".": ["Frame on", () => this.step(1)],
      "<": ["Slower", () => this.faster(-1)],
      ">": ["Faster", () => this.faster(1)],
      l: ["Loop", () => { this.isLoop = !this.isLoop; this.loop.checked = this.isLoop; }],
    };
  }
}
