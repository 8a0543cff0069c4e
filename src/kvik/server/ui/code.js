// Highlights comments, strings, numbers and keywords, as plain data like markdown.js. Languages with the
// same syntax for these form a family; code in other languages is unchanged.

const MAX_CHARACTERS = 50_000; // longer code is not highlighted, as every frame of a stream parses it again

const NUMBER = /(?<number>\b\d[\w.]*)/;
const WORD = /(?<word>[A-Za-z_]\w*)/;
const HASH = /#[^\n]*/;
const SLASHES = /\/\/[^\n]*|\/\*[^]*?(?:\*\/|$)/;
const DASHES = /--[^\n]*/;
const DOUBLE = /"(?:\\.|[^"\\\n])*"?/;
const SINGLE = /'(?:\\.|[^'\\\n])*'?/;
const TRIPLE = /"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)/;
const TEMPLATE = /`(?:\\[^]|[^`\\])*`?/;
const CHARACTER = /'(?:\\[^'\n]{1,10}|\\'|[^'\\\n])'/; // not a Rust lifetime

const BRACES =
  "abstract as async auto await bool break case catch char class const constexpr continue default defer delete do " +
  "double else enum export extends extern false final float fn for from func function go if impl implements import " +
  "in inline int interface let long loop match mod mut namespace new nil null nullptr operator override package " +
  "private protected pub public return self short sizeof static struct super switch template this throw trait true " +
  "try type typedef typename undefined union unsafe unsigned use using var virtual void where while yield";

// Unclosed strings and comments extend to the end of the line or text, so that patterns do not
// backtrack.
const FAMILIES = [
  family({
    languages:
      "python py py3 sh bash shell zsh console yaml yml toml ini ruby rb perl r julia dockerfile makefile cmake",
    comment: HASH,
    strings: [TRIPLE, DOUBLE, SINGLE],
    keywords:
      "and as assert async await break case class continue def del do done elif else end esac except export false " +
      "fi finally for from function global if import in is lambda let local match module nonlocal not null or pass " +
      "raise require return self then true try until while with yield False None True FROM RUN COPY CMD",
  }),
  family({
    languages:
      "c h cpp c++ cc cxx hpp cuda cu java javascript js jsx mjs typescript ts tsx json json5 go swift kotlin kt " +
      "csharp cs php css scss zig dart scala",
    comment: SLASHES,
    strings: [TEMPLATE, DOUBLE, SINGLE],
    keywords: BRACES,
  }),
  family({ languages: "rust rs", comment: SLASHES, strings: [DOUBLE, CHARACTER], keywords: BRACES }),
  family({
    languages: "sql sqlite postgresql postgres mysql lua haskell hs",
    comment: DASHES,
    strings: [DOUBLE, SINGLE],
    keywords:
      "all and as asc between by case create delete desc distinct do drop else elseif end exists false for from " +
      "full function group having if in index inner insert into is join left let limit local module nil not null " +
      "of on or order outer primary repeat return right select set table then true type union until update values " +
      "when where while with",
    anyCase: true,
  }),
];

function family({ languages, comment, strings, keywords, anyCase = false }) {
  const string = strings.map((pattern) => pattern.source).join("|");
  const sources = [`(?<comment>${comment.source})`, `(?<string>${string})`, NUMBER.source, WORD.source];
  const known = new Set(keywords.split(" "));
  return {
    languages: new Set(languages.split(" ")),
    pattern: new RegExp(sources.join("|"), "g"),
    isKeyword: (word) => known.has(anyCase ? word.toLowerCase() : word),
  };
}

// The children of a <code> element: texts and trees.
export function colouredCode(language, code) {
  const found = FAMILIES.find(({ languages }) => languages.has(language.toLowerCase()));
  if (!found || code.length > MAX_CHARACTERS) return [code];
  const children = [];
  let at = 0;
  for (const match of code.matchAll(found.pattern)) {
    const kind = kindOf(match.groups, found.isKeyword);
    if (!kind) continue;
    if (match.index > at) children.push(code.slice(at, match.index));
    children.push(["span", { class: kind }, match[0]]);
    at = match.index + match[0].length;
  }
  if (at < code.length || !children.length) children.push(code.slice(at));
  return children;
}

function kindOf({ comment, string, number, word }, isKeyword) {
  if (comment !== undefined) return "comment";
  if (string !== undefined) return "string";
  if (number !== undefined) return "number";
  return isKeyword(word) ? "keyword" : null;
}
