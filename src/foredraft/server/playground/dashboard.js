// Live figures of the server, read once a second while they can be seen.

import { metricsText } from "./api.js";
import { depthBars, percent, shareBar, timeLines } from "./charts.js";
import { byId, element } from "./dom.js";
import { History, PARTS, sampleOf } from "./metrics.js";

const SECOND = 1000;
const LONGEST_PAUSE = 10 * SECOND; // between tries while the server cannot be reached
const PATIENCE = 5 * SECOND;
const BARS = "Bars: the last minute, in % of the steps with drafts.";
const NO_BARS = "No drafts in the last minute.";
const LINES = "Lines: since the server began.";

function rounded(value) {
  return value < 10 ? String(Math.round(value * 10) / 10) : String(Math.round(value));
}

export class Dashboard {
  constructor() {
    this.panel = byId("live-panel");
    this.state = byId("live-state");
    this.history = new History();
    this.figures = new Map();
    this.timer = null;
    this.pause = SECOND;
    this.polling = false;
    document.addEventListener("visibilitychange", () => this.wake());
    this.panel.addEventListener("toggle", () => this.wake());
  }

  /** Read now, where the figures can be seen; else sleep until they can. */
  wake() {
    clearTimeout(this.timer);
    if (!document.hidden && this.panel.open) this.poll();
  }

  async poll() {
    if (this.polling) return;
    this.polling = true;
    const began = performance.now();
    let text = null;
    try {
      text = await metricsText(AbortSignal.timeout(PATIENCE));
    } catch {
      // Whatever it was (no network, a server that is loading): say so below, and try again, more and more rarely.
    }
    this.polling = false;
    this.pause = text === null ? Math.min(LONGEST_PAUSE, this.pause * 2) : SECOND;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.wake(), Math.max(0, began + this.pause - performance.now()));
    this.state.textContent = text === null ? "No figures from the server. Trying again." : "";
    this.state.hidden = text !== null;
    if (text === null) return;
    this.history.add(sampleOf(text, performance.now() / SECOND));
    this.draw();
  }

  draw() {
    const { history } = this;
    const view = { end: history.last.time, seconds: history.seconds };
    const { minute, total } = history.acceptance();
    const drafted = history.growth("drafts");
    const perStep = history.last.counters.drafts ? 1 + total.reduce((sum, share) => sum + share, 0) : null;
    this.show(
      "acceptance",
      "Accepted by depth",
      perStep ? `${perStep.toFixed(2)} tokens a step` : "no drafts yet",
      depthBars("Drafts accepted by depth", [
        { name: "last minute", values: minute },
        { name: "since start", values: total },
      ]),
      `${drafted ? BARS : NO_BARS} ${LINES}`,
    );
    const speed = history.rates("generated");
    this.show(
      "speed",
      "Tokens a second",
      rounded(speed.at(-1)?.[1] ?? 0),
      timeLines("Tokens a second", [{ name: "tokens a second", points: speed }], {
        ...view,
        top: null,
        words: rounded,
      }),
    );
    this.show(
      "batch",
      "Requests",
      `${history.last.running} running, ${history.last.waiting} waiting`,
      timeLines(
        "Requests",
        [
          { name: "running", points: history.gauge("running") },
          { name: "waiting", points: history.gauge("waiting") },
        ],
        { ...view, top: null, words: rounded },
      ),
      "Full line: running. Dashed: waiting.",
    );
    this.show(
      "cache",
      "Cache in use",
      percent(history.last.cache),
      timeLines("Cache in use", [{ name: "cache in use", points: history.gauge("cache") }], {
        ...view,
        top: 1,
        words: percent,
      }),
    );
    const { hits, queries } = history.last.counters;
    this.show(
      "prefix",
      "Prefix hits",
      queries ? `${percent(hits / queries)} since start` : "no prompts yet",
      timeLines("Prompt tokens found in the cache", [{ name: "found", points: history.ratios("hits", "queries") }], {
        ...view,
        top: 1,
        words: percent,
      }),
      "Prompt tokens that the cache already held.",
    );
    this.drawShares();
  }

  drawShares() {
    const { history } = this;
    const lively = history.growth("steps") > 0;
    const amount = (name) => (lively ? history.growth(name) : history.last.counters[name]);
    const total = PARTS.reduce((sum, part) => sum + amount(part), 0);
    const parts =
      total > 0
        ? PARTS.map((name) => ({
            name,
            share: amount(name) / total,
            words: `${((1000 * amount(name)) / Math.max(1, amount("steps"))).toFixed(2)} ms`,
          }))
        : [];
    this.show(
      "time",
      "Time of a step",
      total > 0 ? `${((1000 * total) / Math.max(1, amount("steps"))).toFixed(1)} ms` : "no steps yet",
      shareBar("Time of a step", parts),
      lively ? "Over the last minute." : "Since the server began.",
    );
  }

  /** Put a chart in its place; the first time it makes the place. */
  show(name, title, value, chart, caption = "") {
    if (!this.figures.has(name)) {
      const places = {
        value: element("output", { for: "" }),
        chart: element("div", { class: "chart" }),
        caption: element("p", { class: "hint" }),
      };
      places.value.setAttribute("aria-live", "off"); // it changes each second
      const head = element("figcaption", {}, element("span", {}, title), places.value);
      byId("live").append(element("figure", { id: `live-${name}` }, head, places.chart, places.caption));
      this.figures.set(name, places);
    }
    const places = this.figures.get(name);
    places.value.textContent = value;
    places.chart.replaceChildren(...chart);
    places.caption.textContent = caption;
    places.caption.hidden = !caption;
  }
}
