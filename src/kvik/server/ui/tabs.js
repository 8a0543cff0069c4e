// Tabs after the ARIA practices: arrow keys select, only the selected tab is in the tab order.

import { byId } from "./dom.js";

export function tabs(list, changed) {
  const all = [...list.querySelectorAll("[role=tab]")];
  const select = (chosen) => {
    for (const tab of all) {
      const on = tab === chosen;
      tab.setAttribute("aria-selected", String(on));
      tab.tabIndex = on ? 0 : -1;
      byId(tab.getAttribute("aria-controls")).hidden = !on;
    }
    changed(chosen);
  };
  list.addEventListener("click", (event) => {
    const tab = event.target.closest("[role=tab]");
    if (tab) select(tab);
  });
  list.addEventListener("keydown", (event) => {
    const at = all.indexOf(document.activeElement);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1 }[event.key];
    if (at < 0 || to === undefined) return;
    event.preventDefault();
    const tab = all[(to + all.length) % all.length];
    tab.focus();
    select(tab);
  });
}
