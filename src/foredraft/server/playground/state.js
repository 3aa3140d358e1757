// What the server says of itself, asked once a second while the page can be seen.

import { health } from "./api.js";

const SECOND = 1000;
const LONGEST_PAUSE = 5 * SECOND; // between tries while the server cannot be reached

/** A state in words, and its kind: "ready", "waiting" (it may pass by itself) or "fault". */
export const STATES = {
  connecting: ["Connecting…", "waiting"],
  loading: ["Loading the model…", "waiting"],
  ready: ["Ready", "ready"],
  key: ["API key needed", "waiting"],
  models: ["No list of models", "fault"],
  draining: ["Draining: no new requests", "waiting"],
  failed: ["Failed: see the server's log", "fault"],
  closed: ["Stopped", "fault"],
  unreachable: ["Unreachable: trying again", "fault"],
};

/** Calls `onBeat(state)` after each look; `state` is a name of STATES. */
export class Heartbeat {
  constructor(onBeat) {
    this.onBeat = onBeat;
    this.timer = null;
    this.pause = SECOND;
    this.asking = false;
    document.addEventListener("visibilitychange", () => this.wake());
    addEventListener("online", () => this.wake());
  }

  /** Ask now, where the page can be seen; else sleep until it can. */
  wake() {
    clearTimeout(this.timer);
    if (!document.hidden) this.beat();
  }

  async beat() {
    if (this.asking) return;
    this.asking = true;
    const began = performance.now();
    const state = await health();
    this.asking = false;
    this.pause = state === "unreachable" ? Math.min(LONGEST_PAUSE, this.pause * 2) : SECOND;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.wake(), Math.max(0, began + this.pause - performance.now()));
    this.onBeat(state);
  }
}
