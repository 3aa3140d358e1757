// The text of an answer as marked tokens, with fenced code in blocks of its own. Every character stays where it is.

import { element } from "./dom.js";
import { tokenElement } from "./depths.js";

const OPENS = /^[ \t]*(`{3,})[^`\n]*\n$/;
const CLOSES = /^[ \t]*(`{3,})[ \t\r]*\n$/;
const MAY_OPEN = /^[ \t]*(`|$)/; // what stands so at the start of a line may turn out to be a fence

export class Prose {
  /** `root`: the element that the tokens go into. */
  constructor(root) {
    this.root = root;
    this.place = root; // the root, or the block of the fence that is open
    this.fence = 0; // how many backticks opened it
    this.line = "";
    this.movable = []; // the tokens of this line alone; they move where it turns out to open a fence
  }

  /** Add a token. One that crosses the edge of a fence is shown as two elements of the same depth. */
  add(text, depth) {
    let held = "";
    const flush = () => {
      if (!held) return;
      const node = tokenElement(held, depth);
      this.place.append(node);
      this.movable.push(node);
      held = "";
    };
    for (const part of text.split(/(?<=\n)/)) {
      if (!this.fence && this.line === "" && MAY_OPEN.test(part)) {
        flush();
        this.movable = [];
      }
      held += part;
      this.line += part;
      if (!part.endsWith("\n")) continue;
      const edge = (this.fence ? CLOSES : OPENS).exec(this.line);
      if (edge && (!this.fence || edge[1].length >= this.fence)) {
        flush();
        this.cross(edge[1].length);
      }
      this.line = "";
    }
    flush();
  }

  cross(numTicks) {
    if (this.fence) {
      this.place = this.root;
      this.fence = 0;
    } else {
      this.place = element("code", { class: "fence" });
      this.root.append(this.place);
      this.place.append(...this.movable);
      this.fence = numTicks;
    }
    this.movable = [];
  }
}
