// The page: watches the server, and puts the parts together.

import { models } from "./api.js";
import { Conversation } from "./conversation.js";
import { Dashboard } from "./dashboard.js";
import { fillLegend } from "./depths.js";
import { byId } from "./dom.js";
import { Settings } from "./settings.js";
import { Heartbeat, STATES } from "./state.js";
import { connectTheme } from "./theme.js";

const WIDE = matchMedia("(min-width: 900px)");
const settings = new Settings();
const conversation = new Conversation(settings);
const dashboard = new Dashboard();
let server = "connecting"; // as it was last seen
let listed = "connecting"; // what became of its list of models: a name of STATES, "ready" once it is there

function showState() {
  const [words, kind] = STATES[server === "ready" ? listed : server];
  const state = byId("state");
  if (state.textContent !== words) state.textContent = words; // said once, not at every look
  state.dataset.kind = kind;
}

async function loadModels() {
  try {
    settings.setModels(await models(settings.key.value));
    settings.askForKey("");
    listed = "ready";
  } catch (error) {
    if (error.status === 401) {
      listed = "key";
      const isWrong = settings.key.value !== "";
      settings.askForKey(isWrong ? "The server does not take this API key." : "This server needs an API key.");
    } else if (error.status !== 0 && error.status !== 503) {
      listed = "models";
      conversation.fail(error);
    } // else the server came and went: the next look tells
  } finally {
    fillLegend(byId("legend"), settings.maxDrafts);
    showState();
  }
}

const heartbeat = new Heartbeat((state) => {
  if (state !== "ready") listed = "connecting"; // what comes back may be another server
  server = state;
  showState();
  if (state === "ready" && listed === "connecting") loadModels();
  dashboard.beat(state !== "unreachable");
});

function unfold() {
  byId("settings-panel").open = WIDE.matches;
  byId("live-panel").open = WIDE.matches;
}

connectTheme(byId("theme"));
unfold();
WIDE.addEventListener("change", unfold);
settings.key.addEventListener("change", loadModels);
settings.model.addEventListener("change", () => {
  settings.offerDrafts();
  fillLegend(byId("legend"), settings.maxDrafts);
});
byId("colours").addEventListener("change", (event) => {
  document.body.classList.toggle("plain", !event.target.checked);
});
if (WIDE.matches) conversation.input.focus(); // on a phone it would bring up the keyboard
heartbeat.wake();
