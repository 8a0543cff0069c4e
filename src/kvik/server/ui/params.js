// The system prompt and the sampling controls: a row of the table each, those of numbers as the
// engine declares them. What is left empty is not sent.

import { byId, make } from "./dom.js";
import { PARAMETERS } from "./parameters.js";

const NUMBER = "number";
const CHECK = "checkbox";
const LINES = "lines"; // of a text, each for itself
const TEXT = "text";

// name, label, kind, limits of a number, note
const CONTROLS = [
  ...PARAMETERS.map(({ name, label, limits, note }) => [name, label, NUMBER, limits, note]),
  ["stop", "Stop texts, one a line", LINES, {}, "The answer ends before any of them"],
  ["json_schema", "JSON Schema", TEXT, {}, "The answer is JSON that satisfies it"],
  ["ignore_eos", "Ignore end of text", CHECK, {}, "Go on to the length limit"],
  ["logprobs", "Colour by probability", CHECK, {}, "The darker, the less likely the token was"],
];

export class Params {
  // `settings` of the last visit, if any; `changed(settings, words)` says what they are now.
  constructor(form, settings, changed) {
    this.form = form;
    form.addEventListener("submit", (event) => event.preventDefault());
    form.append(...CONTROLS.map((row) => control(...row)));
    const reset = make("button", { type: "reset", textContent: "Reset all" });
    form.append(make("div", { className: "whole" }, reset));
    const fields = [byId("system"), ...CONTROLS.map(([name]) => byId(`param-${name}`))];
    this.#restore(fields, settings ?? {});
    const tell = () => changed(this.#settings(fields), this.#words());
    for (const field of fields) field.addEventListener("input", tell);
    form.addEventListener("reset", () => {
      byId("system").value = "";
      setTimeout(tell); // when the fields are reset
    });
    changed(this.#settings(fields), this.#words());
  }

  get system() {
    return byId("system").value.trim();
  }

  // The fields of a request; null, and `refused()`, if one is wrong.
  read(kind) {
    if (!this.form.checkValidity()) {
      this.refused();
      return null;
    }
    const fields = {};
    for (const [name, , type] of CONTROLS) {
      const input = byId(`param-${name}`);
      if (type === CHECK) {
        if (input.checked) Object.assign(fields, name === "logprobs" ? wanted(kind) : { [name]: true });
      } else if (input.value !== "") {
        fields[name] = READ[type](input.value);
      }
    }
    return fields;
  }

  // Shows the settings, and the browser's own complaint about one.
  refused() {
    byId("settings").showModal();
    this.form.reportValidity();
  }

  #settings(fields) {
    const set = fields.filter((field) => (field.type === CHECK ? field.checked : field.value !== ""));
    return Object.fromEntries(set.map((field) => [field.id, field.type === CHECK ? true : field.value]));
  }

  #restore(fields, settings) {
    for (const field of fields) {
      const value = settings[field.id];
      if (field.type === CHECK) field.checked = value === true;
      else if (typeof value === "string") field.value = value;
    }
  }

  #words() {
    const words = CONTROLS.map(([name, label, type]) => {
      const input = byId(`param-${name}`);
      if (type === CHECK) return input.checked ? label : "";
      if (input.value === "") return "";
      return type === NUMBER ? `${label} ${input.value}` : label.split(",")[0];
    });
    return [this.system && "System prompt", ...words].filter(Boolean).join(", ");
  }
}

const wanted = (kind) => (kind === "chat" ? { logprobs: true, top_logprobs: 5 } : { logprobs: 5 });

const READ = {
  [NUMBER]: Number,
  [LINES]: (text) => text.split("\n").filter((line) => line !== ""),
  [TEXT]: (text) => text.trim(),
};

function control(name, label, type, limits, note) {
  const id = `param-${name}`;
  const known = { id, name, title: note };
  if (type === CHECK) {
    const input = make("input", { ...known, type });
    return make("div", { className: "check" }, make("label", { htmlFor: id, title: note }, input, label));
  }
  const input =
    type === NUMBER
      ? make("input", { ...known, type, placeholder: "default", inputMode: "decimal", ...limits })
      : make("textarea", { ...known, rows: 2 });
  const box = make("div", {}, make("label", { htmlFor: id, textContent: label }), input);
  if (type !== NUMBER) box.className = "whole";
  return box;
}
