// The system prompt and the sampling controls. Numeric parameters come from the engine's declarations.
// Empty fields are not sent.

import { byId, make } from "./dom.js";
import { PARAMETERS } from "./parameters.js";

const NUMBER = "number";
const CHECK = "checkbox";
const LINES = "lines"; // a list, one entry per line
const TEXT = "text";

// [name, label, kind, limits of a number, note]
const CONTROLS = [
  ...PARAMETERS.map(({ name, label, limits, note }) => [name, label, NUMBER, limits, note]),
  ["stop", "Stop strings, one per line", LINES, {}, "The answer ends before the first of them"],
  ["json_schema", "JSON Schema", TEXT, {}, "The answer is JSON that satisfies it"],
  ["ignore_eos", "Ignore end of text", CHECK, {}, "Generate up to the length limit"],
  ["logprobs", "Colour by probability", CHECK, {}, "Less likely tokens are darker"],
];

export class Params {
  // `settings`: of the last visit, or null. `changed(settings, words)` is called with the current ones.
  constructor(form, settings, changed) {
    this.form = form;
    form.addEventListener("submit", (event) => event.preventDefault());
    form.append(...CONTROLS.map((row) => control(...row)));
    const reset = make("button", { type: "reset", textContent: "Reset all" });
    form.append(make("div", { className: "whole" }, reset));
    const fields = [byId("system"), ...CONTROLS.map(([name]) => byId(`param-${name}`))];
    this.#restore(fields, settings ?? {});
    const notify = () => changed(this.#settings(fields), this.#words());
    for (const field of fields) field.addEventListener("input", notify);
    form.addEventListener("reset", () => {
      byId("system").value = "";
      setTimeout(notify); // after the browser has reset the fields
    });
    notify();
  }

  get system() {
    return byId("system").value.trim();
  }

  // Returns the fields of a request; if one is invalid, calls `refused()` and returns null.
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

  // Opens the settings, where the browser marks the invalid field.
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
