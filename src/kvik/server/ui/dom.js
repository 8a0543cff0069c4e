// Helpers for elements, the clipboard, and text areas that grow.

export const byId = (id) => document.getElementById(id);

export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// A button with a symbol of icons.svg, named `label` for screen readers.
export function iconButton(symbol, label, clicked) {
  const button = make("button", { type: "button", className: "icon", title: label, ariaLabel: label }, icon(symbol));
  button.addEventListener("click", clicked);
  return button;
}

export function icon(symbol) {
  const [svg, use] = ["svg", "use"].map((tag) => document.createElementNS("http://www.w3.org/2000/svg", tag));
  use.setAttribute("href", `ui/icons.svg#${symbol}`);
  svg.append(use);
  return svg;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Copies a text and returns whether this worked. Browsers offer navigator.clipboard only over HTTPS and
// on localhost.
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = make("textarea", { value: text, className: "unseen" });
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    return copied;
  }
}

// Makes a text area as high as its text; style.css limits it.
export function fit(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + area.offsetHeight - area.clientHeight}px`;
}

// Calls `send` on Enter if `when(event)`, but not while an input method composes a word.
export function sends(area, when, send) {
  area.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.isComposing || !when(event)) return;
    event.preventDefault();
    send();
  });
}
