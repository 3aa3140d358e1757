// One question with its answer: what the server streams of it, and its place on the page.

import { element } from "./dom.js";
import { Prose } from "./prose.js";
import { summary } from "./summary.js";

const ENDINGS = {
  length: "It ends here: the limit of tokens is reached.",
  error: "It ends here: the server met an error.",
};

function button(text, label, onClick, className = "quiet") {
  const node = element("button", { type: "button", class: className, "aria-label": label }, text);
  node.addEventListener("click", onClick);
  return node;
}

async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  // Over plain HTTP from another machine there is no clipboard but this way.
  const area = element("textarea", { class: "unseen", readonly: "" });
  area.value = text;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  if (!copied) throw new Error("the browser does not let the page copy");
  return undefined;
}

export class Turn {
  /** `actions`: {edit, again}, called when the reader asks for it. */
  constructor(question, actions) {
    this.question = question;
    this.answer = "";
    this.sentAt = performance.now();
    this.firstAt = this.lastAt = null;
    this.numFirst = 0;
    this.numPieces = 0;
    this.numOwn = 0; // pieces that are the model's own; each ends a step
    this.usage = this.speculation = this.ending = null;
    this.text = element("p", { class: "text" });
    this.prose = new Prose(this.text);
    this.note = element("p", { class: "note", hidden: "" });
    this.copy = button("Copy", "Copy the answer", () => this.copyAnswer());
    this.tools = element("div", { class: "tools", hidden: "" }, this.copy);
    this.tools.append(button("Try again", "Try again: ask for another answer", actions.again, "quiet last-only"));
    this.foot = element("div", { class: "foot" });
    const asked = element("p", { class: "text" }, question);
    const edit = button("Edit", "Edit this message and send it again", actions.edit, "quiet last-only");
    this.node = element(
      "div",
      { class: "turn" },
      element("article", { class: "user", "aria-label": "You" }, asked, element("div", { class: "tools" }, edit)),
      element(
        "article",
        { class: "model", "aria-label": "Model", "aria-busy": "true" },
        this.text,
        this.note,
        this.foot,
        this.tools,
      ),
    );
    this.node.classList.add("waiting");
  }

  /** Take one chunk of the stream. */
  take(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    for (const choice of chunk.choices ?? []) {
      const content = choice.delta?.content;
      const pieces = choice.pieces ?? (content ? [{ text: content, depth: 0 }] : []);
      const shown = pieces.filter((piece) => piece.text);
      if (shown.length) this.show(shown);
      if (choice.speculation) this.speculation = choice.speculation;
      if (choice.finish_reason) this.ending = choice.finish_reason;
    }
  }

  show(pieces) {
    this.lastAt = performance.now();
    if (this.firstAt === null) {
      this.firstAt = this.lastAt;
      this.numFirst = pieces.length;
      this.node.classList.remove("waiting");
    }
    this.numPieces += pieces.length;
    this.answer += pieces.map((piece) => piece.text).join("");
    this.numOwn += pieces.filter((piece) => piece.depth === 0).length;
    for (const { text, depth } of pieces) this.prose.add(text, depth);
  }

  /** The stream is over. `note` says why, where it did not come to its own end; `isFault`: that is an error. */
  finish(note, isFault) {
    this.node.classList.remove("waiting");
    this.node.querySelector(".model").removeAttribute("aria-busy");
    const words = note || ENDINGS[this.ending] || "";
    const isError = isFault || (!note && this.ending === "error");
    const mark = isError ? [element("span", { "aria-hidden": "true" }, "⚠ "), element("strong", {}, "Error: ")] : [];
    this.note.classList.toggle("fault", isError);
    this.note.replaceChildren(...mark, words);
    this.note.hidden = !words;
    this.tools.hidden = false;
    this.copy.hidden = !this.answer;
    const numTokens = this.usage?.completion_tokens ?? this.numPieces;
    if (numTokens)
      this.foot.replaceChildren(
        summary({
          ...this.timing(numTokens),
          numTokens,
          tokensPerStep: this.tokensPerStep,
          usage: this.usage,
          speculation: this.speculation,
        }),
      );
  }

  /** In words. Of an answer without its end it is counted from the pieces. Null where there were no drafts. */
  get tokensPerStep() {
    const { speculation } = this;
    if (speculation) return speculation.num_drafts ? speculation.mean_acceptance_length.toFixed(2) : null;
    return this.numOwn && this.numPieces > this.numOwn ? `≈ ${(this.numPieces / this.numOwn).toFixed(2)}` : null;
  }

  /** Seconds to the first text, and tokens a second after the first chunk (null where there was but one). */
  timing(numTokens) {
    const seconds = (this.lastAt - this.firstAt) / 1000;
    return {
      firstSeconds: this.firstAt === null ? null : (this.firstAt - this.sentAt) / 1000,
      tokensPerSecond: seconds > 0 && numTokens > this.numFirst ? (numTokens - this.numFirst) / seconds : null,
    };
  }

  async copyAnswer() {
    try {
      await copyText(this.answer);
      this.copy.textContent = "Copied";
    } catch {
      this.copy.textContent = "Could not copy";
    }
    setTimeout(() => (this.copy.textContent = "Copy"), 2000);
  }
}
