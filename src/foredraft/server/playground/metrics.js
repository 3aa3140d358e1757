// The server's metrics: the Prometheus text, the samples that the page keeps of it, and the figures that follow.

const PREFIX = "foredraft:";
const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)/;
const LABEL = /([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"/g;
export const PARTS = ["target", "draft", "verification", "host"];

/** Series by name, each a list of {labels, value}. */
export function parse(text) {
  const series = new Map();
  for (const line of text.split("\n")) {
    const found = line.startsWith("#") ? null : LINE.exec(line);
    if (!found) continue;
    const labels = Object.fromEntries([...(found[2] ?? "").matchAll(LABEL)].map((label) => [label[1], label[2]]));
    if (!series.has(found[1])) series.set(found[1], []);
    series.get(found[1]).push({ labels, value: Number(found[3].replace("Inf", "Infinity")) });
  }
  return series;
}

/** The figures that the page shows, at `time` in seconds. Counters are totals since the server began. */
export function sampleOf(text, time) {
  const series = parse(text);
  const entries = (name) => series.get(PREFIX + name) ?? [];
  const sum = (name) => entries(name).reduce((total, entry) => total + entry.value, 0);
  const accepted = [];
  for (const { labels, value } of entries("spec_decode_num_accepted_tokens_per_pos_total")) {
    const position = Number(labels.position);
    if (position >= 0 && position < 64) accepted[position] = (accepted[position] ?? 0) + value;
  }
  const counters = {
    generated: sum("generation_tokens_total"),
    queries: sum("prefix_cache_queries_total"),
    hits: sum("prefix_cache_hits_total"),
    drafts: sum("spec_decode_num_drafts_total"),
    steps: sum("engine_steps_total"),
    ...Object.fromEntries(PARTS.map((part) => [part, sum(`${part}_seconds_total`)])),
  };
  return {
    time,
    counters,
    accepted: Array.from(accepted, (value) => value ?? 0),
    running: sum("num_requests_running"),
    waiting: sum("num_requests_waiting"),
    cache: sum("kv_cache_usage_perc"),
  };
}

/** Samples of the last minute. A counter that falls means another server: what was kept then goes. */
export class History {
  constructor(seconds = 60) {
    this.seconds = seconds;
    this.samples = [];
  }

  add(sample) {
    if (this.last && sample.counters.steps < this.last.counters.steps) this.samples = [];
    this.samples.push(sample);
    this.samples = this.samples.filter((kept) => kept.time >= sample.time - this.seconds);
  }

  get first() {
    return this.samples[0];
  }

  get last() {
    return this.samples.at(-1);
  }

  /** How much a counter grew within the samples. */
  growth(name) {
    return this.last.counters[name] - this.first.counters[name];
  }

  /** [time, growth a second] between neighbouring samples. */
  rates(name) {
    return this.pairs((before, after) => (after.counters[name] - before.counters[name]) / (after.time - before.time));
  }

  /** [time, growth of one counter for each of another's] between neighbours; none where the other stood still. */
  ratios(name, other) {
    const ratio = (before, after) =>
      (after.counters[name] - before.counters[name]) / (after.counters[other] - before.counters[other]);
    return this.pairs(ratio).filter(([, value]) => Number.isFinite(value));
  }

  pairs(value) {
    return this.samples.slice(1).map((after, i) => [after.time, value(this.samples[i], after)]);
  }

  /** [time, value] of a gauge. */
  gauge(name) {
    return this.samples.map((sample) => [sample.time, sample[name]]);
  }

  /** Shares of the cycles with drafts whose draft of each depth was accepted: {minute, total}; null: no drafts. */
  acceptance() {
    const share = (accepted, drafts) => (drafts > 0 ? accepted / drafts : null);
    const { accepted, counters } = this.last;
    return {
      minute: accepted.map((value, i) => share(value - (this.first.accepted[i] ?? 0), this.growth("drafts"))),
      total: accepted.map((value) => share(value, counters.drafts)),
    };
  }
}
