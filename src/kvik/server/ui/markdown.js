// Markdown as plain data: a text becomes blocks, and a block is a tree [tag, attributes, ...children].
//
// This file does not touch the page. prose.js makes elements from the trees, so a model's text is never
// parsed as HTML: tags and attributes come from here, and text only becomes a text node or the address
// of a link that `safe` accepts. Time is linear in the text: no pattern can backtrack, and nesting is
// bounded.

import { colouredCode } from "./code.js";

const MAX_NESTING = 8; // of lists and quotes; deeper ones stay text
const MAX_OPEN = 16; // nested emphasis and links
const MAX_TICKS = 8; // backquotes around inline code

const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/;
const FENCE = /^ *(`{3,}|~{3,})(.*)$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)(.*)$/;
const TASK = /^\[([ xX])\] /;

// -- blocks ------------------------------------------------------------------------------------------

// The blocks of a text: [{ start, complete, tree }]. `start` is the block's offset in the text;
// `complete`: its first line has ended, so that the block before it can no longer change.
export function parse(text) {
  const lines = text.split("\n");
  const starts = [0];
  for (const line of lines) starts.push(starts.at(-1) + line.length + 1);
  const plain = lines.map((line) => (line.endsWith("\r") ? line.slice(0, -1) : line));
  return blocks(plain, 0).map(({ first, tree }) => ({
    start: starts[first],
    complete: first < lines.length - 1,
    tree,
  }));
}

// Each reader takes the lines and the index of one, and returns [tree, index of the next line], or null
// if no such block begins there. A paragraph always does.
const READERS = [fence, heading, rule, quote, list, table, paragraph];

function blocks(lines, depth) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (lines[at].trim() === "") {
      at += 1;
      continue;
    }
    const first = at;
    for (const read of READERS) {
      const block = read(lines, at, depth);
      if (!block) continue;
      found.push({ first, tree: block[0] });
      at = block[1];
      break;
    }
  }
  return found;
}

const trees = (lines, depth) => blocks(lines, depth).map((block) => block.tree);

function fence(lines, at) {
  const opened = FENCE.exec(lines[at]);
  if (!opened) return null;
  const [, marks, info] = opened;
  if (marks[0] === "`" && info.includes("`")) return null; // inline code
  const indent = indentOf(lines[at]);
  const code = [];
  let next = at + 1;
  for (; next < lines.length; next++) {
    const line = lines[next].trim();
    if (line.length >= marks.length && line === marks[0].repeat(line.length)) break;
    code.push(lines[next].slice(Math.min(indent, indentOf(lines[next]))));
  }
  return [codeBlock(info.trim().split(/\s/)[0], code.join("\n")), next + 1];
}

function codeBlock(language, code) {
  const copy = ["button", { type: "button", class: "copy" }, "Copy"];
  return [
    "div",
    { class: "code" },
    ["div", { class: "bar" }, ["span", {}, language.slice(0, 30) || "text"], copy],
    ["pre", { tabindex: "0" }, ["code", {}, ...colouredCode(language, code)]],
  ];
}

function heading(lines, at) {
  const found = HEADING.exec(lines[at]);
  if (!found) return null;
  let text = (found[2] ?? "").trim();
  const bare = text.slice(0, lastOther(text, "#") + 1);
  if (bare === "" || bare.endsWith(" ")) text = bare.trimEnd(); // closing marks
  const level = Math.min(6, found[1].length + 2); // the page has its own h1 and h2
  return [[`h${level}`, {}, ...inline(text)], at + 1];
}

function rule(lines, at) {
  const marks = lines[at].replaceAll(" ", "");
  const same = marks.length >= 3 && "-*_".includes(marks[0]) && marks === marks[0].repeat(marks.length);
  return same ? [["hr", {}], at + 1] : null;
}

function quote(lines, at, depth) {
  if (depth >= MAX_NESTING || !QUOTE.test(lines[at])) return null;
  let next = at;
  const inner = [];
  while (next < lines.length && QUOTE.test(lines[next])) inner.push(lines[next++].replace(QUOTE, ""));
  return [["blockquote", {}, ...trees(inner, depth + 1)], next];
}

// Lines indented by two spaces or more belong to the item above: models seldom write the three that
// numbered items require.
function list(lines, at, depth) {
  const head = ITEM.exec(lines[at]);
  if (!head || depth >= MAX_NESTING) return null;
  const [base, kind] = [head[1].length, kindOf(head[2])];
  const items = [];
  let next = at;
  let inside = 0; // columns of the item's marker
  let blank = false;
  for (; next < lines.length; next++) {
    const line = lines[next];
    if (line.trim() === "") {
      items.at(-1).push("");
      blank = true;
      continue;
    }
    const indent = indentOf(line);
    const found = indent < base + 2 && !isRule(line) ? ITEM.exec(line) : null;
    if (found && kindOf(found[2]) === kind) {
      inside = found[1].length + found[2].length + (found[3].length > 4 ? 1 : found[3].length || 1);
      items.push([found[4]]);
    } else if (indent >= base + 2) {
      items.at(-1).push(line.slice(Math.min(indent, inside)));
    } else if (!found && !blank && !begins(line)) {
      items.at(-1).push(line); // a line of the item's paragraph
    } else break;
    blank = false;
  }
  const number = Number.parseInt(head[2], 10);
  const attributes = Number.isNaN(number) || number === 1 ? {} : { start: String(number) };
  const made = items.map((item) => listItem(item, depth));
  return [[kind === "number" ? "ol" : "ul", attributes, ...made], next];
}

// The first paragraph of an item has no <p>.
function listItem(lines, depth) {
  const task = TASK.exec(lines[0]);
  const plain = task ? [lines[0].slice(task[0].length), ...lines.slice(1)] : lines;
  const [first, ...rest] = trees(plain, depth + 1);
  const children = first?.[0] === "p" ? [...first.slice(2), ...rest] : first ? [first, ...rest] : [];
  return task ? ["li", { class: "task" }, task[1] === " " ? "☐ " : "☑ ", ...children] : ["li", {}, ...children];
}

function table(lines, at) {
  const aligned = alignments(lines, at);
  if (!aligned) return null;
  const row = (tag, line) => {
    const texts = cells(line);
    return ["tr", {}, ...aligned.map((align, i) => [tag, align, ...inline(texts[i] ?? "")])];
  };
  const body = [];
  let next = at + 2;
  for (; next < lines.length && lines[next].includes("|"); next++) body.push(row("td", lines[next]));
  const head = ["thead", {}, row("th", lines[at])];
  return [["div", { class: "wide", tabindex: "0" }, ["table", {}, head, ["tbody", {}, ...body]]], next];
}

// The attributes of a table's columns, if a table begins at this line.
function alignments(lines, at) {
  if (!lines[at].includes("|") || !lines[at + 1]?.includes("-")) return null;
  const marks = cells(lines[at + 1]);
  if (marks.length !== cells(lines[at]).length || !marks.every((mark) => /^:?-+:?$/.test(mark))) return null;
  return marks.map((mark) => {
    if (!mark.endsWith(":")) return {};
    return { class: mark.startsWith(":") ? "centre" : "right" };
  });
}

// The texts between the bars of a line; `\|` is not a bar.
function cells(line) {
  const texts = [""];
  for (const part of line.trim().match(/\\[^]|[^\\|]+|\||\\$/g) ?? []) {
    if (part === "|") texts.push("");
    else texts[texts.length - 1] += part === "\\|" ? "|" : part;
  }
  if (texts.length > 1 && texts.at(-1).trim() === "") texts.pop();
  if (texts.length > 1 && texts[0].trim() === "") texts.shift();
  return texts.map((text) => text.trim());
}

function paragraph(lines, at) {
  let next = at + 1;
  while (next < lines.length && lines[next].trim() !== "") {
    if (begins(lines[next]) || alignments(lines, next)) break;
    next += 1;
  }
  const text = lines.slice(at, next).map((line) => line.trim());
  return [["p", {}, ...inline(text.join("\n"))], next];
}

// Whether a line ends the paragraph above it. Of numbered items only the first does, since a line may
// begin with a year.
function begins(line) {
  if (HEADING.test(line) || FENCE.test(line) || QUOTE.test(line) || isRule(line)) return true;
  const item = ITEM.exec(line);
  return item !== null && item[4] !== "" && (kindOf(item[2]) !== "number" || /^1[.)]$/.test(item[2]));
}

const isRule = (line) => rule([line], 0) !== null;

const kindOf = (mark) => (/\d/.test(mark) ? "number" : mark);

const indentOf = (line) => line.length - line.trimStart().length;

function lastOther(text, character) {
  let at = text.length - 1;
  while (at >= 0 && text[at] === character) at -= 1;
  return at;
}

// -- inside a block ----------------------------------------------------------------------------------

const SPECIAL = /[\\`*_~[\]!<$]|https?:\/\//g;
const FORMULA = /\\\([^\n]{1,400}?\\\)|\\\[[^]{1,1000}?\\\]|\$\$[^]{1,1000}?\$\$/y;
const TICKS = /`+/g;
const AUTOLINK = /<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/y;
const BREAK = /<br ?\/?>/iy;
const ADDRESS = /https?:\/\/[^\s<>"`|]{1,2000}/y;
const DESTINATION = /\( ?<?([^\s()<>]{1,2000}(?:\([^\s()<>]{0,200}\)[^\s()<>]{0,200}){0,3})>?(?: "[^"\n]{0,500}")? ?\)/y;
const PUNCTUATION = /[\p{P}\p{S}]/u;

// The children of a block: texts and trees.
export function inline(text) {
  return new Inline(text).read();
}

class Inline {
  #at = 0;
  #open = [{ mark: "", children: [] }]; // the outermost frame, then those opened and not closed
  #unpaired = new Set(); // lengths of backquote runs without a match further on

  constructor(text) {
    this.text = text;
  }

  read() {
    const { text } = this;
    while (this.#at < text.length) {
      SPECIAL.lastIndex = this.#at;
      const found = SPECIAL.exec(text);
      const end = found ? found.index : text.length;
      this.#add(text.slice(this.#at, end));
      this.#at = end;
      if (found) this.#special(found[0]);
    }
    while (this.#open.length > 1) this.#giveUp();
    return this.#open[0].children;
  }

  #special(mark) {
    if ((mark === "\\" || mark === "$") && this.#match(FORMULA)) this.#formula();
    else if (mark === "$") this.#take("$");
    else if (mark === "\\") this.#escape();
    else if (mark === "`") this.#code();
    else if (mark === "<") this.#angle();
    else if (mark === "!" || mark === "[") this.#bracket(mark);
    else if (mark === "]") this.#link();
    else if (mark.length > 1) this.#address();
    else this.#emphasis(mark);
  }

  #escape() {
    const next = this.text[this.#at + 1] ?? "";
    const escapes = "\\`*_~[]!<>#+-.|{}\"'$&%".includes(next) && next !== "";
    this.#take(escapes ? next : "\\", escapes ? 2 : 1);
  }

  // TeX formulas are not parsed.
  #formula() {
    const [formula] = this.#match(FORMULA);
    this.#add(["code", { class: "formula" }, formula]);
    this.#at += formula.length;
  }

  #code() {
    const size = this.#run("`");
    if (size <= MAX_TICKS && !this.#unpaired.has(size)) {
      TICKS.lastIndex = this.#at + size;
      for (let run; (run = TICKS.exec(this.text)); ) {
        if (run[0].length !== size) continue;
        const code = this.text.slice(this.#at + size, run.index).replaceAll("\n", " ");
        const padded = code.startsWith(" ") && code.endsWith(" ") && code.trim() !== "";
        this.#add(["code", {}, padded ? code.slice(1, -1) : code]);
        this.#at = run.index + size;
        return;
      }
      this.#unpaired.add(size);
    }
    this.#take("`".repeat(size));
  }

  #angle() {
    const link = this.#match(AUTOLINK);
    if (link) {
      this.#add(anchor(link[1], [link[1]]));
      this.#at += link[0].length;
    } else if (this.#match(BREAK)) {
      this.#take("\n", this.#match(BREAK)[0].length);
    } else this.#take("<");
  }

  #address() {
    let address = this.#match(ADDRESS)?.[0];
    if (!address || this.#open.some((frame) => frame.mark === "[")) {
      this.#take(this.text.slice(this.#at, this.#at + 7)); // inside the brackets of a link
      return;
    }
    address = withoutEnd(address);
    this.#add(anchor(address, [address]));
    this.#at += address.length;
  }

  #bracket(mark) {
    const image = mark === "!";
    if (image && this.text[this.#at + 1] !== "[") this.#take("!");
    else if (this.#open.length > MAX_OPEN) this.#take(image ? "![" : "[");
    else {
      this.#open.push({ mark: "[", source: image ? "![" : "[", children: [] });
      this.#at += image ? 2 : 1;
    }
  }

  // Images become links: the page fetches nothing from other servers.
  #link() {
    const at = this.#open.findLastIndex((frame) => frame.mark === "[");
    DESTINATION.lastIndex = this.#at + 1;
    const found = at > 0 ? DESTINATION.exec(this.text) : null;
    if (!found) {
      if (at > 0) this.#giveUpTo(at);
      this.#take("]");
      return;
    }
    while (this.#open.length > at + 1) this.#giveUp();
    const { children } = this.#open.pop();
    for (const frame of this.#open) if (frame.mark === "[") frame.mark = "dead"; // no link in a link
    this.#add(anchor(found[1], children.length ? children : [found[1]]));
    this.#at += 1 + found[0].length;
  }

  #emphasis(mark) {
    const size = this.#run(mark);
    const [before, after] = [this.text[this.#at - 1] ?? " ", this.text[this.#at + size] ?? " "];
    const sense = flanks(mark, before, after);
    this.#at += size;
    if (size > 3 || (mark === "~" && size !== 2)) {
      this.#add(mark.repeat(size));
      return;
    }
    let left = size;
    while (sense.closes && left) {
      const at = this.#closable(mark, left);
      if (at < 0) break;
      while (this.#open.length > at + 1) this.#giveUp();
      const { children, size: used } = this.#open.pop();
      this.#add([mark === "~" ? "del" : used === 2 ? "strong" : "em", {}, ...children]);
      left -= used;
    }
    const opened = sense.opens ? { 1: [1], 2: [2], 3: [1, 2] }[left] ?? [] : [];
    for (const used of opened) {
      if (this.#open.length > MAX_OPEN) this.#add(mark.repeat(used));
      else this.#open.push({ mark, size: used, source: mark.repeat(used), children: [] });
    }
    if (!opened.length && left) this.#add(mark.repeat(left));
  }

  // The innermost frame that this mark can close, inside the brackets of the current link.
  #closable(mark, left) {
    for (let at = this.#open.length - 1; at > 0; at--) {
      const frame = this.#open[at];
      if (frame.mark === "[") return -1;
      if (frame.mark === mark && frame.size <= left && frame.children.length) return at;
    }
    return -1;
  }

  // Makes the mark of the innermost frame text, since it was not closed.
  #giveUp() {
    const { source, children } = this.#open.pop();
    this.#add(source);
    for (const child of children) this.#add(child);
  }

  #giveUpTo(at) {
    while (this.#open.length > at) this.#giveUp();
  }

  #add(child) {
    const { children } = this.#open.at(-1);
    if (typeof child !== "string") children.push(child);
    else if (typeof children.at(-1) === "string") children[children.length - 1] += child;
    else if (child) children.push(child);
  }

  #take(text, size = text.length) {
    this.#add(text);
    this.#at += size;
  }

  #run(mark) {
    let end = this.#at;
    while (this.text[end] === mark) end += 1;
    return end - this.#at;
  }

  #match(pattern) {
    pattern.lastIndex = this.#at;
    return pattern.exec(this.text);
  }
}

// Whether a mark between two characters may open or close. Underscores inside words and stars between
// digits (multiplication) do neither.
function flanks(mark, before, after) {
  if (mark === "*" && /\d/.test(before) && /\d/.test(after)) return { opens: false, closes: false };
  const [spaceBefore, spaceAfter] = [/\s/.test(before), /\s/.test(after)];
  const [signBefore, signAfter] = [PUNCTUATION.test(before), PUNCTUATION.test(after)];
  const left = !spaceAfter && (!signAfter || spaceBefore || signBefore);
  const right = !spaceBefore && (!signBefore || spaceAfter || signAfter);
  if (mark !== "_") return { opens: left, closes: right };
  return { opens: left && (!right || signBefore), closes: right && (!left || signAfter) };
}

// An address without the punctuation after it and without an unmatched closing bracket.
function withoutEnd(address) {
  let unopened = address.split(")").length - address.split("(").length;
  let size = address.length;
  for (; size > 0; size--) {
    const last = address[size - 1];
    if (last === ")" && unopened > 0) unopened -= 1;
    else if (!".,:;!?*_~'".includes(last)) break;
  }
  return address.slice(0, size);
}

function anchor(address, children) {
  const href = safe(address);
  if (href === null) return ["span", { class: "unsafe", title: address }, ...children];
  return ["a", { href, title: href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children];
}

const SCHEMES = ["http:", "https:", "mailto:"];

// The address as the browser parses it, or null if the page must not open it.
export function safe(address) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return null; // relative: it would mean this server
  }
  return SCHEMES.includes(url.protocol) ? url.href : null;
}
