// What an answer cost and how its drafts fared.

import { depthBars } from "./charts.js";
import { element } from "./dom.js";

/** Seconds in words of a fitting unit. */
export function duration(seconds) {
  return seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(2)} s`;
}

/** The figures of one answer, and bars of the drafts that were accepted by depth. Absent figures are left out. */
export function summary({ numTokens, firstSeconds, tokensPerSecond, tokensPerStep, usage, speculation }) {
  const figures = [["tokens", numTokens]];
  if (usage) figures.push(["prompt tokens", usage.prompt_tokens]);
  if (tokensPerSecond !== null) figures.push(["tokens/s", tokensPerSecond.toFixed(1)]);
  if (firstSeconds !== null) figures.push(["to first token", duration(firstSeconds)]);
  if (tokensPerStep !== null) figures.push(["tokens a step", tokensPerStep]);
  const list = element(
    "dl",
    {},
    ...figures.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))),
  );
  const whole = element("div", { class: "summary" }, list);
  if (speculation?.num_drafts) {
    const label = "Drafts accepted by depth, of this answer";
    const rates = [{ name: "accepted", values: speculation.accepted_rates }];
    whole.append(
      element("figure", { class: "small" }, ...depthBars(label, rates), element("figcaption", {}, "accepted by depth")),
    );
  }
  return whole;
}
