// Elements by id, and new ones; the clipboard, and text areas that grow.

export const byId = (id) => document.getElementById(id);

export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// A button that shows a symbol of icons.svg alone, and says `label`.
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

// Returns whether the text is on the clipboard now. Pages served over plain HTTP on a network have
// no navigator.clipboard.
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

// Lets a text area be as high as its text; style.css bounds it.
export function fit(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + area.offsetHeight - area.clientHeight}px`;
}

// Enter in this area does what `send` does if `when(event)`; not while a word is being composed.
export function sends(area, when, send) {
  area.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.isComposing || !when(event)) return;
    event.preventDefault();
    send();
  });
}
