// Small charts, drawn as SVG shapes. Each comes with a sentence as its label and a table that only screen readers meet.

import { element, shape } from "./dom.js";

const WIDTH = 300;
const HEIGHT = 64;

/** A share in per cent; a dash where there is none. */
export function percent(share) {
  return share === null ? "–" : `${Math.round(share * 100)} %`;
}

function table(caption, heads, rows) {
  const cells = (tag, values) => values.map((value) => element(tag, tag === "th" ? { scope: "col" } : {}, value));
  const body = rows.map(([name, ...values]) =>
    element("tr", {}, element("th", { scope: "row" }, name), ...cells("td", values)),
  );
  const head = element("thead", {}, element("tr", {}, ...cells("th", heads)));
  return element(
    "div",
    { class: "unseen" },
    element("table", {}, element("caption", {}, caption), head, element("tbody", {}, ...body)),
  );
}

function canvas(label, [top, height], ...children) {
  return shape("svg", { viewBox: `0 ${top} ${WIDTH} ${height}`, role: "img", "aria-label": label }, ...children);
}

/**
 * Bars of shares (0 to 1) by depth, from depth 1. `series`: [{name, values}]; the first is drawn as full bars (null: as
 * none), a second as lines across them.
 */
export function depthBars(label, series) {
  const [bars, marks] = series;
  const count = Math.max(bars.values.length, 1);
  const step = Math.min(WIDTH / count, 60);
  const y = (share) => HEIGHT * (1 - Math.min(1, Math.max(0, share)));
  const parts = [shape("line", { class: "axis", x1: 0, x2: step * count, y1: HEIGHT, y2: HEIGHT })];
  bars.values.forEach((share, i) => {
    const [left, width] = [i * step + step * 0.14, step * 0.72];
    const depth = Math.min(i + 1, 8);
    parts.push(shape("rect", { class: "room", x: left, y: 0, width, height: HEIGHT }));
    const middle = left + width / 2;
    const mark = marks ? y(marks.values[i]) : HEIGHT;
    const top = share === null ? HEIGHT : y(share);
    parts.push(shape("rect", { class: `bar d${depth}`, x: left, y: top, width, height: HEIGHT - top }));
    if (marks) parts.push(shape("line", { class: "mark", x1: left - 2, x2: left + width + 2, y1: mark, y2: mark }));
    if (share !== null) {
      const free = mark > top - 18 ? Math.min(mark, top) : top; // a line just above the bar would cross its number
      parts.push(shape("text", { class: "value", x: middle, y: free - 4 }, Math.round(share * 100)));
    }
    parts.push(shape("text", { x: middle, y: HEIGHT + 16 }, i + 1));
  });
  const rows = bars.values.map((_, i) => [i + 1, ...series.map(({ values }) => percent(values[i]))]);
  const said = bars.values.map((share, i) => `depth ${i + 1} ${percent(share)}`).join(", ");
  const heads = ["depth", ...series.map(({ name }) => name)];
  return [canvas(`${label}: ${said || "none"}`, [-18, HEIGHT + 40], ...parts), table(label, heads, rows)];
}

/**
 * Lines over the last minute. `series`: [{name, points: [[time, value]]}], at most two; `end`: the time at the right
 * edge; `top`: the value at the upper edge, or null for the highest there is. `words` puts a value into words.
 */
export function timeLines(label, series, { end, seconds, top, words }) {
  const values = series.flatMap(({ points }) => points.map(([, value]) => value));
  const highest = top ?? Math.max(1, ...values);
  const x = (time) => (WIDTH * (time - end + seconds)) / seconds;
  const y = (value) => 2 + (HEIGHT - 4) * (1 - Math.min(1, value / highest));
  const parts = [0, 0.5, 1].map((share) =>
    shape("line", { class: share ? "grid" : "axis", x1: 0, x2: WIDTH, y1: y(share * highest), y2: y(share * highest) }),
  );
  series.forEach(({ points }, i) => {
    const path = points.map(([time, value]) => `${x(time).toFixed(1)},${y(value).toFixed(1)}`);
    if (i === 0 && points.length > 1) {
      const [from, to] = [x(points[0][0]), x(points.at(-1)[0])].map((edge) => edge.toFixed(1));
      parts.push(
        shape("polygon", { class: "area", points: `${from},${HEIGHT - 2} ${path.join(" ")} ${to},${HEIGHT - 2}` }),
      );
    }
    parts.push(shape("polyline", { class: `trend t${i}`, points: path.join(" ") }));
  });
  parts.push(shape("text", { class: "scale", x: 0, y: 13 }, words(highest)));
  const rows = series.map(({ name, points }) => {
    const all = points.map(([, value]) => value);
    const mean = all.reduce((total, value) => total + value, 0) / all.length;
    return [name, ...(all.length ? [all.at(-1), mean, Math.max(...all)].map(words) : ["–", "–", "–"])];
  });
  const said = rows.map(([name, now, mean, high]) => `${name} now ${now}, mean ${mean}, highest ${high}`).join("; ");
  return [
    canvas(`${label} over the last minute: ${said}`, [0, HEIGHT], ...parts),
    table(label, ["", "now", "mean", "highest"], rows),
  ];
}

/** One bar divided into parts. `parts`: [{name, share, words}], shares that sum to 1. */
export function shareBar(label, parts) {
  let left = 0;
  const rects = parts.map(({ share }, i) => {
    const rect = shape("rect", {
      class: `part p${i}`,
      x: left * WIDTH,
      y: 0,
      width: Math.max(0, share * WIDTH - 1),
      height: 14,
    });
    left += share;
    return rect;
  });
  const said = parts.map(({ name, share }) => `${name} ${percent(share)}`).join(", ");
  const keys = parts.map(({ name, share, words }, i) =>
    element(
      "li",
      {},
      shape(
        "svg",
        { viewBox: "0 0 10 10", class: "key", "aria-hidden": "true" },
        shape("rect", { class: `part p${i}`, width: 10, height: 10 }),
      ),
      `${name} ${percent(share)}`,
      element("small", {}, ` ${words}`),
    ),
  );
  return [canvas(`${label}: ${said || "none"}`, [0, 14], ...rects), element("ul", { class: "keys" }, ...keys)];
}
