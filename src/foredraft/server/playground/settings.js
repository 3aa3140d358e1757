// The controls: what they add to a request, and which of them the server's complaint is about.

import { byId, element } from "./dom.js";
import { ServerError } from "./api.js";
import { keep, restored } from "./kept.js";

export class Settings {
  constructor() {
    this.panel = byId("settings-panel");
    this.form = byId("settings");
    this.model = byId("model");
    this.key = byId("api-key");
    this.drafts = byId("num-drafts");
    this.models = new Map();
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.addEventListener("input", () => {
      this.clearFault();
      this.keep();
    });
    this.kept = restored();
    for (const control of this.lasting()) {
      const value = this.kept[control.id];
      if (value === undefined || control instanceof HTMLSelectElement) continue; // lists come with the models
      if (control.type === "checkbox") control.checked = value;
      else control.value = value;
    }
  }

  /** The controls that outlast a reload: all but the key, which stays in memory. */
  lasting() {
    return [...this.form.elements].filter((control) => control.id && control !== this.key);
  }

  keep() {
    const value = (control) => (control.type === "checkbox" ? control.checked : control.value);
    this.kept = Object.fromEntries(this.lasting().map((control) => [control.id, value(control)]));
    keep(this.kept);
  }

  /** Say beside the key's field that it is wanted, and go there; no words: it is not. */
  askForKey(words) {
    const note = byId("key-note");
    note.textContent = words;
    note.hidden = !words;
    if (!words) return;
    this.panel.open = true;
    this.key.setAttribute("aria-invalid", "true");
    this.key.setAttribute("aria-describedby", "key-note");
    this.key.focus();
  }

  /** Show the server's models, keeping the chosen one. */
  setModels(models) {
    this.models = new Map(models.map((model) => [model.id, model]));
    const chosen = this.model.value || this.kept.model;
    this.model.replaceChildren(...models.map((model) => element("option", { value: model.id }, model.id)));
    if (this.models.has(chosen)) this.model.value = chosen;
    this.offerDrafts();
  }

  /** The most draft tokens a step that the chosen model takes; 0 where it has no draft modules. */
  get maxDrafts() {
    return this.models.get(this.model.value)?.max_num_speculative_tokens ?? 0;
  }

  /** Offer 0 to maxDrafts draft tokens, keeping the choice where it is still offered. */
  offerDrafts() {
    const chosen = this.drafts.value || this.kept["num-drafts"];
    const options = [
      element("option", { value: "" }, this.maxDrafts ? "As the server is set" : "This model has no drafts"),
    ];
    for (let count = 0; this.maxDrafts && count <= this.maxDrafts; count++) {
      options.push(element("option", { value: count }, count === 0 ? "0: no drafts" : count));
    }
    this.drafts.replaceChildren(...options);
    this.drafts.disabled = !this.maxDrafts;
    this.drafts.value = options.some((option) => option.value === chosen) ? chosen : "";
  }

  /** The body of a chat request with these messages. A field that holds no number is an error that names it. */
  requestBody(messages) {
    const system = byId("system").value;
    const body = {
      model: this.model.value,
      messages: system.trim() ? [{ role: "system", content: system }, ...messages] : messages,
      stream: true,
      stream_options: { include_usage: true },
      return_speculation: true,
    };
    for (const control of this.form.querySelectorAll("input[type=number], #num-drafts")) {
      if (control.validity.badInput) throw new ServerError(`${control.name}: not a number.`, { param: control.name });
      if (control.value !== "") body[control.name] = Number(control.value);
    }
    if (byId("json").checked) body.response_format = { type: "json_object" };
    return body;
  }

  /** Mark the control of this field and show it. A field without a control is left to the message. */
  showFault(param) {
    const control = param && this.form.elements.namedItem(param);
    if (!control) return;
    control.setAttribute("aria-invalid", "true");
    control.setAttribute("aria-describedby", "error");
    for (let node = control; node; node = node.parentElement?.closest("details")) {
      if (node instanceof HTMLDetailsElement) node.open = true;
    }
  }

  clearFault() {
    for (const control of this.form.querySelectorAll("[aria-invalid]")) {
      control.removeAttribute("aria-invalid");
      control.removeAttribute("aria-describedby");
    }
  }
}
