// Live figures of the server, read at each look at it while they can be seen.

import { metricsText } from "./api.js";
import { depthBars, percent, shareBar, timeLines } from "./charts.js";
import { byId, element } from "./dom.js";
import { History, PARTS, sampleOf } from "./metrics.js";

const SECOND = 1000;
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
    this.reading = false;
    this.reachable = false;
    this.readAt = null; // the time of day of the last figures
    this.panel.addEventListener("toggle", () => this.beat(this.reachable));
  }

  /** The server was looked at: read its figures where they can be seen, or mark those that are there as old. */
  async beat(reachable) {
    this.reachable = reachable;
    if (!reachable) return this.age();
    if (!this.panel.open || this.reading) return undefined;
    this.reading = true;
    let text = null;
    try {
      text = await metricsText();
    } catch {
      // Whatever it was, it is said below; the next look tries again.
    }
    this.reading = false;
    if (text === null) return this.age();
    this.readAt = new Date();
    this.panel.classList.remove("stale");
    this.state.hidden = true;
    this.history.add(sampleOf(text, performance.now() / SECOND));
    return this.draw();
  }

  /** Say that there are no new figures, and mark each of the old ones. */
  age() {
    if (this.panel.classList.contains("stale")) return;
    const since = this.readAt ? ` Those below are from ${this.readAt.toLocaleTimeString()}.` : "";
    this.state.textContent = `No figures from the server.${since} Trying again.`;
    this.state.hidden = false;
    this.panel.classList.add("stale");
    for (const { value } of this.figures.values()) value.append(element("small", { class: "old" }, " old"));
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
