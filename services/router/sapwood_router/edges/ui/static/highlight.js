// Colours for code: comments, strings, numbers, words. One pass, each place looked at once; what is unknown stays as it is.

import { el } from "./dom.js";

const words = (text) => new Set(text.split(" "));
const C = words(
  "abstract as async auto await bool boolean break byte case catch chan char class const constexpr continue crate def default defer delete do double " +
    "dyn else enum export extends extern false final finally float fn for foreach from func function go goto if impl implements import in int " +
    "interface internal is let long loop match mod module move mut namespace new nil null nullptr object operator override package private " +
    "protected pub public range readonly ref return select self short signed sizeof static string struct super switch template this throw throws " +
    "trait true try type typedef typename typeof undefined union unsafe unsigned use using val var virtual void volatile when where while yield",
);
const PYTHON = words(
  "False None True and as assert async await break case class continue def del elif else except finally for from global if import in is lambda " +
    "match nonlocal not or pass raise return self try while with yield",
);
const SHELL = words("case cd do done echo elif else esac exit export fi for function if in local read return set source then unset while");
const SQL = words(
  "all alter and as asc between by case count create delete desc distinct drop else end exists from full group having in index inner insert into is " +
    "join key left like limit not null on or order outer primary references right select set sum table then union update values view when where with",
);
const RUBY = words(
  "BEGIN END and begin break case class def do else elsif end ensure false for if in module next nil not or require rescue return self super then " +
    "true unless until when while yield",
);

const HASH = String.raw`#[^\n]*`;
const SLASHES = String.raw`\/\/[^\n]*|\/\*[^]*?(?:\*\/|$)`;
const QUOTES = String.raw`"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?`;
const TRIPLE = String.raw`"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)`;
const TICKS = "`(?:\\\\.|[^`\\\\])*`?";
const REST = String.raw`(?<number>\b\d[\w.]*)|(?<word>[A-Za-z_$][\w$]*)`;

const language = (comment, string, known, anyCase = false) => ({
  pattern: new RegExp(`(?<comment>${comment})|(?<string>${string})|${REST}`, "g"),
  known,
  anyCase,
});
const c = language(SLASHES, `${QUOTES}|${TICKS}`, C);
const python = language(HASH, `${TRIPLE}|${QUOTES}`, PYTHON);
const shell = language(String.raw`(?<![\w$])#[^\n]*`, QUOTES, SHELL);
const data = language(HASH, QUOTES, words("true false null yes no"));
const sql = language(String.raw`--[^\n]*|\/\*[^]*?(?:\*\/|$)`, QUOTES, SQL, true);
const markup = language(String.raw`<!--[^]*?(?:-->|$)`, QUOTES, new Set());
const LANGUAGES = {
  python, py: python, bash: shell, sh: shell, shell, zsh: shell, console: shell, sql, yaml: data, yml: data, toml: data, ini: data,
  ruby: language(HASH, QUOTES, RUBY), rb: language(HASH, QUOTES, RUBY), html: markup, xml: markup, svg: markup, text: null, txt: null, diff: null,
};

/** The parts of a code's text: texts and coloured elements. */
export function highlight(text, name) {
  const known = Object.hasOwn(LANGUAGES, name.toLowerCase()); // not what all objects have, such as "constructor"
  const chosen = known ? LANGUAGES[name.toLowerCase()] : name ? c : null;
  if (!chosen) return [text];
  const parts = [];
  let end = 0;
  for (const found of text.matchAll(chosen.pattern)) {
    const { comment, string, number, word } = found.groups;
    const kind =
      comment !== undefined ? "comment" : string !== undefined ? "string" : number !== undefined ? "number"
      : chosen.known.has(chosen.anyCase ? word.toLowerCase() : word) ? "word" : text[found.index + word.length] === "(" ? "call" : null;
    if (!kind) continue;
    parts.push(text.slice(end, found.index), el("span", { className: `code-${kind}` }, found[0]));
    end = found.index + found[0].length;
  }
  return [...parts, text.slice(end)];
}
