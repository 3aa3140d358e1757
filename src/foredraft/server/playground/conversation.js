// The conversation: asks, shows what comes, and keeps what was typed when something fails.

import { ServerError, streamChat } from "./api.js";
import { byId } from "./dom.js";
import { Turn } from "./turn.js";

const STOPPED = "Stopped.";
const NEAR_END = 60; // pixels from the end within which the page follows the answer

export class Conversation {
  constructor(settings) {
    this.settings = settings;
    this.turns = [];
    this.running = null; // the AbortController of the answer that is being written
    this.log = byId("log");
    this.input = byId("message");
    this.error = byId("error");
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.stop());
    byId("stop").addEventListener("click", () => this.stop());
    byId("new-chat").addEventListener("click", () => this.clear());
  }

  /** Ask what is in the message box; nothing happens while an answer is being written, or where the box is empty. */
  send() {
    const question = this.input.value;
    if (this.running || !question.trim()) return;
    if (this.ask(question)) this.input.value = "";
  }

  /** Start the answer to `question`. False, with words beside the form, where the settings make no request. */
  ask(question) {
    this.say("");
    this.settings.clearFault();
    let body;
    try {
      body = this.settings.requestBody([...this.messages(), { role: "user", content: question }]);
    } catch (error) {
      this.fail(error);
      return false;
    }
    const turn = new Turn(question, { edit: () => this.edit(turn), again: () => this.again(turn) });
    this.turns.push(turn);
    this.log.append(turn.node);
    this.scrollToEnd();
    this.receive(turn, body);
    return true;
  }

  /** What was said so far. A turn without an answer is not part of it. */
  messages() {
    const answered = this.turns.filter((turn) => turn.answer);
    return answered.flatMap((turn) => [
      { role: "user", content: turn.question },
      { role: "assistant", content: turn.answer },
    ]);
  }

  async receive(turn, body) {
    const controller = new AbortController();
    this.setRunning(controller);
    this.announce("The model is answering.");
    let note = "";
    let isFault = false;
    try {
      await streamChat(body, this.settings.key.value, controller.signal, (chunk) => {
        const follow = this.atEnd();
        turn.take(chunk);
        if (follow) this.scrollToEnd();
      });
    } catch (error) {
      isFault = error.name !== "AbortError";
      note = isFault ? error.message : STOPPED;
      if (isFault && this.turns.includes(turn)) this.fail(error);
    } finally {
      if (this.running === controller) this.setRunning(null);
    }
    if (!this.turns.includes(turn)) return; // a new chat was begun meanwhile
    const follow = this.atEnd();
    turn.finish(note, isFault);
    if (follow) this.scrollToEnd();
    if (note && !turn.answer) this.giveBack(turn);
    this.announce(`${note || "The answer is complete."} ${turn.answer}`);
  }

  /** Put the question of a turn without an answer back into the box, unless something else was typed meanwhile. */
  giveBack(turn) {
    if (!this.input.value) this.input.value = turn.question;
    else if (this.input.value !== turn.question) return; // the turn stays, with its "Try again"
    this.remove(turn);
  }

  stop() {
    this.running?.abort();
  }

  /** Take the last question back into the box. */
  edit(turn) {
    if (this.running) return;
    this.remove(turn);
    this.input.value = turn.question;
    this.input.focus();
  }

  again(turn) {
    if (this.running) return;
    const kept = this.turns.indexOf(turn);
    this.remove(turn);
    if (!this.ask(turn.question)) {
      this.turns.splice(kept, 0, turn);
      this.log.append(turn.node);
    }
    this.input.focus();
  }

  remove(turn) {
    this.turns = this.turns.filter((other) => other !== turn);
    turn.node.remove();
  }

  clear() {
    this.stop();
    for (const turn of [...this.turns]) this.remove(turn);
    this.say("");
    this.settings.clearFault();
    this.announce("New chat.");
    this.input.focus();
  }

  fail(error) {
    if (!(error instanceof ServerError)) throw error; // a fault of the page: to the console
    this.say(error.message);
    this.settings.showFault(error.param);
  }

  /** Words next to the form; none hides them. */
  say(words) {
    this.error.textContent = words;
    this.error.hidden = !words;
  }

  announce(words) {
    byId("announcer").textContent = words;
  }

  setRunning(controller) {
    const focused = document.activeElement;
    this.running = controller;
    byId("send").hidden = controller !== null;
    byId("stop").hidden = controller === null;
    if (focused === byId("send") || focused === byId("stop")) this.input.focus(); // a hidden button loses the focus
  }

  atEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.log;
    return scrollHeight - scrollTop - clientHeight < NEAR_END;
  }

  scrollToEnd() {
    this.log.scrollTop = this.log.scrollHeight;
  }
}
