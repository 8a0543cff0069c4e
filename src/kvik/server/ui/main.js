// The page: the playground and the live engine.

import { Api } from "./api.js";
import { Chat } from "./chat.js";
import { Completion } from "./completion.js";
import { byId, copyText, setText } from "./dom.js";
import { Engine } from "./engine.js";
import { Panel } from "./panels.js";
import { Params } from "./params.js";
import { Sidebar } from "./sidebar.js";
import { Store } from "./store.js";
import { tabs } from "./tabs.js";

const model = { name: "", context: 0 }; // from the server
const api = new Api();
const store = new Store(changedElsewhere);
const params = new Params(byId("params"), store.setting("params"), (settings, words) => {
  store.remember("params", settings);
  setText(byId("changed"), words || "Default settings");
});
const chat = new Chat({ api, params, store, model, kept });
const completion = new Completion({ api, params, model });
const sidebar = new Sidebar(store, { open: go, forget: (id) => chat.forget(id) });
const engine = new Engine(api);

async function begin() {
  api.key = byId("key").value.trim();
  engine.restart();
  try {
    const { data } = await api.get("v1/models");
    Object.assign(model, { name: data[0].id, context: data[0].max_model_len ?? 0 });
    for (const id of ["model", "welcome-model"]) setText(byId(id), model.name);
    if (model.context) setText(byId("welcome-note"), `Context: ${model.context.toLocaleString("en")} tokens`);
    chat.fail("");
  } catch (error) {
    chat.fail(error.message);
  }
}

// -- the fragment of the address names the conversation shown -----------------------------------------

function go(id) {
  if (id !== address()) window.history.pushState(null, "", id ? `#${id}` : window.location.pathname + window.location.search);
  show();
  Panel.uncover();
  byId("tab-chat").click();
  write();
}

// Focuses the input, except where an on-screen keyboard would cover half of the window.
function write() {
  if (!window.matchMedia("(pointer: coarse)").matches) byId("say").focus();
}

const address = () => window.location.hash.slice(1);

function show() {
  chat.open(store.get(address()) ?? undefined);
  sidebar.show(chat.id);
  entitle();
}

function entitle() {
  const title = store.get(chat.id)?.title;
  document.title = title ? `${title} – kvik` : "kvik";
}

function kept(conversation, safe) {
  if (conversation.id === chat.id && store.get(chat.id)) window.history.replaceState(null, "", `#${chat.id}`);
  sidebar.show(chat.id, safe);
  entitle();
}

function changedElsewhere(id) {
  if (id === chat.id && store.get(id) && !chat.running) show();
  else sidebar.show(chat.id);
}

// -- controls of the whole page -----------------------------------------------------------------------

new Panel("history", "(min-width: 78rem)", store);
new Panel("engine", "(min-width: 62rem)", store);
tabs(document.querySelector("[role=tablist]"), () => Panel.uncover());

for (const id of ["open-settings", "changed"]) byId(id).addEventListener("click", () => byId("settings").showModal());
byId("close-settings").addEventListener("click", () => byId("settings").close());
byId("settings").addEventListener("click", (event) => event.target === byId("settings") && byId("settings").close()); // on the backdrop

document.addEventListener("click", async ({ target }) => {
  if (!target.matches(".copy")) return;
  setText(target, (await copyText(target.closest(".code").querySelector("pre").textContent)) ? "Copied" : "Failed");
  setTimeout(() => setText(target, "Copy"), 1500);
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing || byId("settings").open) return;
  if (!Panel.uncover() && !chat.stop()) completion.stop();
});

window.addEventListener("popstate", show);
byId("key").addEventListener("change", begin);
show();
write();
begin();
