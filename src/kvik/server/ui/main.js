// The page: a playground beside the live engine.

import { Api } from "./api.js";
import { byId, setText } from "./dom.js";
import { Engine } from "./engine.js";
import { Params } from "./params.js";
import { tabs } from "./tabs.js";
import { Talk } from "./talk.js";

const api = new Api();
const talk = new Talk(api, new Params(byId("params")));
const engine = new Engine(api);

async function begin() {
  api.key = byId("key").value.trim();
  engine.restart();
  try {
    const { data } = await api.get("v1/models");
    talk.model = data[0].id;
    setText(byId("model"), data[0].id);
    byId("error").hidden = true;
  } catch (error) {
    byId("error").hidden = false;
    setText(byId("error"), error.message);
  }
}

tabs(document.querySelector("[role=tablist]"), () => (byId("error").hidden = true));
byId("key").addEventListener("change", begin);
begin();
