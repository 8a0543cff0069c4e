// Markdown on the page: elements made from the trees of markdown.js, updated as the text grows.
//
// Blocks that can no longer change are skipped. In the rest only differences are replaced, so that a
// selection and the scroll position of a code block survive the stream.

import { parse } from "./markdown.js";

export class Prose {
  #text = "";
  #base = 0; // offset in the text of the first block that may still change
  #done = 0; // number of elements before it

  constructor(element) {
    this.element = element;
  }

  set text(text) {
    if (!text.startsWith(this.#text.slice(0, this.#base))) this.#base = this.#done = 0;
    this.#text = text;
    const blocks = parse(text.slice(this.#base));
    renew(this.element, this.#done, blocks.map((block) => block.tree));
    const last = blocks.findLastIndex((block) => block.complete);
    if (last > 0) {
      this.#base += blocks[last].start;
      this.#done += last;
    }
  }
}

// Updates the children of an element, from index `first` on, to match the trees.
function renew(element, first, trees) {
  trees.forEach((tree, i) => {
    const child = element.childNodes[first + i];
    if (!child) element.append(built(tree));
    else if (!updated(child, tree)) child.replaceWith(built(tree));
  });
  while (element.childNodes.length > first + trees.length) element.lastChild.remove();
}

function updated(node, tree) {
  if (typeof tree === "string") {
    if (node.nodeType !== Node.TEXT_NODE) return false;
    if (node.data !== tree) {
      if (tree.startsWith(node.data)) node.appendData(tree.slice(node.data.length));
      else node.data = tree;
    }
    return true;
  }
  const [tag, attributes, ...children] = tree;
  if (node.nodeName !== tag.toUpperCase() || node.attributes.length !== Object.keys(attributes).length) return false;
  if (!Object.entries(attributes).every(([name, value]) => node.getAttribute(name) === value)) return false;
  renew(node, 0, children);
  return true;
}

function built(tree) {
  if (typeof tree === "string") return document.createTextNode(tree);
  const [tag, attributes, ...children] = tree;
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  for (const child of children) element.append(built(child));
  return element;
}
