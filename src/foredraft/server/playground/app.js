// The page: waits for the server, then puts the parts together.

import { health, models } from "./api.js";
import { Conversation } from "./conversation.js";
import { Dashboard } from "./dashboard.js";
import { fillLegend } from "./depths.js";
import { byId } from "./dom.js";
import { Settings } from "./settings.js";
import { connectTheme } from "./theme.js";

const WIDE = matchMedia("(min-width: 900px)");
const PAUSE = 1000; // milliseconds between looks at a server that is not ready
const settings = new Settings();
const conversation = new Conversation(settings);
const dashboard = new Dashboard();

function showState(words, kind) {
  const state = byId("state");
  if (state.textContent !== words) state.textContent = words; // said once, not at every look
  state.dataset.kind = kind;
}

const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

async function waitUntilReady() {
  for (;;) {
    let state;
    try {
      state = await health();
    } catch (error) {
      state = { ready: false, reason: error.message };
    }
    if (state.ready) return;
    showState(`Waiting for the server. ${state.reason}`, "waiting");
    await pause(PAUSE);
  }
}

async function loadModels() {
  try {
    settings.setModels(await models(settings.key.value));
    showState("Ready", "ready");
  } catch (error) {
    showState(error.message, "fault");
    if (error.status === 401) {
      settings.panel.open = true;
      settings.key.focus();
    }
  }
  fillLegend(byId("legend"), settings.maxDrafts);
}

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
dashboard.wake();
if (WIDE.matches) conversation.input.focus(); // on a phone it would bring up the keyboard
await waitUntilReady();
await loadModels();
