// How a token came: 0 for the model's own, 1 to 8 for a draft that was accepted at that depth.

import { element } from "./dom.js";

const DEEPEST = 8; // the style sheet has this many steps; deeper tokens share the last

/** How a token of this depth came, in words. */
export function depthInWords(depth) {
  return depth === 0 ? "the model's own" : `draft accepted at depth ${depth}`;
}

/** An element for one piece of an answer. */
export function tokenElement(text, depth) {
  const step = Math.min(depth, DEEPEST);
  return element("span", { class: `token d${step}`, "data-depth": depth, title: depthInWords(depth) }, text);
}

/** Fill the list `legend` with the scale from 0 to `maxDepth`. */
export function fillLegend(legend, maxDepth) {
  const steps = [];
  for (let depth = 0; depth <= Math.min(maxDepth, DEEPEST); depth++) {
    const text = depth === 0 ? "own" : String(depth);
    const mark = element("span", { class: `token d${depth}`, "aria-hidden": "true" }, text);
    steps.push(
      element("li", { title: depthInWords(depth) }, mark, element("span", { class: "unseen" }, depthInWords(depth))),
    );
  }
  legend.replaceChildren(...steps);
}
