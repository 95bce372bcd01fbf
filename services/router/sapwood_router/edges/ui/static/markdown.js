// A little Markdown: code, headings, lists, tables, quotes, formulas, bold, italic. What is no such thing, links and HTML among it, is text.

import { button, copy, el } from "./dom.js";
import { formula } from "./formula.js";
import { highlight } from "./highlight.js";

const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+#.-]*)/;
const HEADING = /^(#{1,6})\s+(.*)/;
const ITEM = /^(\s*)(?:[-*+]|(\d{1,9})[.)])\s+(.*)/;
const QUOTE = /^\s{0,3}>\s?(.*)/;
const INLINE = new RegExp(
  [
    /(?<!`)(`{1,2})(?!`)(?<code>.+?)(?<!`)\1(?!`)/,
    /\*\*(?=\S)(?<bold>.+?)\*\*/,
    /\*(?=\S)(?<italic>[^*]+?)\*/,
    /\$\$(?<shown>[^$]+)\$\$/,
    /\\\[(?<block>(?:[^\\]|\\(?![[\]])){1,4000}?)\\\]/,
    /\\\((?<within>(?:[^\\]|\\(?![()])){1,4000}?)\\\)/,
    /(?<![\w$])\$(?=[^\s$])(?<dollars>[^$\n]*[^\s$\\])\$(?![\w$])/,
    /(?<![*_\w])_(?=\S)(?<under>[^_\n]+?)(?<=\S)_(?!\w)/,
  ]
    .map(({ source }) => source)
    .join("|"),
  "s",
);
const MATH_OPENS = /^\s*(\$\$|\\\[)/;
const MATH_ENDS = { $$: "$$", "\\[": "\\]" };
const RULE = /^\s{0,3}(?:(?:-\s*){3,}|(?:\*\s*){3,}|(?:_\s*){3,})$/;
const LONGEST = 20_000; // of a block that is looked at: beyond it, time would grow with the square
const DEEPEST = 6;
const MOST_CELLS = 4000; // of a table: a row may be short and have as many cells as the head

/** Cuts a text into blocks. More text changes none but the last. */
function blocksOf(text) {
  const blocks = [];
  let lines = [];
  let fence = null;
  let formulaEnd = null;
  const end = () => {
    if (lines.length) blocks.push(lines.join("\n"));
    lines = [];
  };
  for (const line of text.split("\n")) {
    if (fence !== null) {
      lines.push(line);
      if (line.trim().startsWith(fence) && /^[`~]+$/.test(line.trim())) {
        end();
        fence = null;
      }
      continue;
    }
    if (formulaEnd !== null) {
      lines.push(line);
      if (line.includes(formulaEnd)) {
        end();
        formulaEnd = null;
      }
      continue;
    }
    const opened = FENCE.exec(line);
    const math = opened ? null : MATH_OPENS.exec(line);
    if (math && !line.slice(math[0].length).includes(MATH_ENDS[math[1]])) {
      end();
      formulaEnd = MATH_ENDS[math[1]];
      lines.push(line);
      continue;
    }
    if (opened || HEADING.test(line) || !line.trim()) end();
    if (opened) fence = opened[1];
    if (line.trim()) lines.push(line);
    if (HEADING.test(line)) end();
  }
  end();
  return blocks;
}

function inline(text) {
  const parts = [];
  let rest = text;
  for (let found = INLINE.exec(rest); found !== null; found = INLINE.exec(rest)) {
    const { code, bold, italic, under, shown, block, within, dollars } = found.groups;
    parts.push(rest.slice(0, found.index));
    if (code !== undefined) parts.push(el("code", {}, code));
    else if (bold !== undefined) parts.push(el("strong", {}, ...inline(bold)));
    else if ((italic ?? under) !== undefined) parts.push(el("em", {}, italic ?? under));
    else parts.push(formula((shown ?? block ?? within ?? dollars).trim(), (shown ?? block) !== undefined) ?? found[0]);
    rest = rest.slice(found.index + found[0].length);
  }
  return [...parts, rest];
}

const cellsOf = (line) => {
  const cells = line.trim().replaceAll("\\|", "\u0000").split("|").map((cell) => cell.replaceAll("\u0000", "|").trim());
  return cells.slice(cells[0] === "" ? 1 : 0, cells.length > 1 && cells.at(-1) === "" ? -1 : undefined);
};
const isDivider = (line) => line.includes("-") && line.includes("|") && cellsOf(line).every((cell) => /^:?-+:?$/.test(cell));

/** A table of lines, the second its divider, which says how columns are aligned. */
function tableOf([head, divider, ...lines]) {
  const sides = cellsOf(divider).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "end") : ""));
  if (sides.length * (lines.length + 1) > MOST_CELLS) return el("p", {}, [head, divider, ...lines].join("\n"));
  const row = (line, name) => {
    const cells = cellsOf(line);
    return el("tr", {}, ...sides.map((side, index) => el(name, { className: side }, ...inline(cells[index] ?? ""))));
  };
  const table = el("table", {}, el("thead", {}, row(head, "th")), el("tbody", {}, ...lines.map((line) => row(line, "td"))));
  return el("div", { className: "wide", tabIndex: 0, role: "group", "aria-label": "Table" }, table);
}

/** A list of `{indent, number, text}`; deeper ones are lists within. */
function listOf(items, depth = 1) {
  const [{ indent, number }] = items;
  const list = number === undefined ? el("ul") : el("ol", { start: Number(number) });
  for (let at = 0; at < items.length; ) {
    let next = at + 1;
    while (depth < DEEPEST && next < items.length && items[next].indent > indent + 1) next++;
    const inner = items.slice(at + 1, next);
    list.append(el("li", {}, ...inline(items[at].text), inner.length ? listOf(inner, depth + 1) : null));
    at = next;
  }
  return list;
}

function codeOf(block, language) {
  const lines = block.split("\n").slice(1);
  if (lines.length && /^\s*(```+|~~~+)\s*$/.test(lines.at(-1))) lines.pop();
  const text = lines.join("\n");
  const copying = button("Copy", (event) => copy(text, event.currentTarget), { className: "quiet" });
  const head = el("div", { className: "code-head" }, el("span", {}, language || "code"), copying);
  return el("div", { className: "code-block" }, head, el("pre", { tabIndex: 0 }, el("code", {}, ...highlight(text, language))));
}

function render(block) {
  if (block.length > LONGEST) return [el("p", {}, block)];
  const fence = FENCE.exec(block);
  if (fence) return [codeOf(block, fence[2])];
  const heading = HEADING.exec(block);
  if (heading) return [el("p", { className: "heading", role: "heading", "aria-level": heading[1].length + 2 }, ...inline(heading[2]))];
  const math = MATH_OPENS.exec(block);
  if (math && block.trimEnd().endsWith(MATH_ENDS[math[1]])) {
    const drawn = formula(block.trim().slice(2, -2).trim(), true);
    if (drawn) return [el("div", { className: "formula" }, drawn)];
  }
  const made = [];
  let kind = null;
  let held = [];
  const end = () => {
    if (kind === "item") made.push(listOf(held));
    else if (held.length) made.push(el(kind === "quote" ? "blockquote" : "p", {}, ...inline(held.join("\n"))));
    held = [];
  };
  const lines = block.split("\n");
  for (let at = 0; at < lines.length; at++) {
    const line = lines[at];
    if (line.includes("|") && at + 1 < lines.length && isDivider(lines[at + 1])) {
      end();
      kind = null;
      let last = at + 2;
      while (last < lines.length && lines[last].includes("|")) last++;
      made.push(tableOf(lines.slice(at, last)));
      at = last - 1;
      continue;
    }
    if (RULE.test(line)) {
      end();
      kind = null;
      made.push(el("hr"));
      continue;
    }
    const item = ITEM.exec(line);
    const quote = QUOTE.exec(line);
    if (kind === "item" && !item && /^\s/.test(line)) {
      held.at(-1).text += "\n" + line.trim(); // an item's next line
      continue;
    }
    const next = item ? "item" : quote ? "quote" : "text";
    if (next !== kind) end();
    kind = next;
    held.push(item ? { indent: item[1].length, number: item[2], text: item[3] } : quote ? quote[1] : line);
  }
  end();
  return made;
}

/** Shows a text that grows in an element; what is complete is left as it is. */
export class MarkdownView {
  constructor(element) {
    this.element = element;
    this.shown = []; // of each block its text and its elements
  }

  update(text) {
    const blocks = blocksOf(text);
    let same = 0;
    while (same < this.shown.length && this.shown[same].text === blocks[same]) same++;
    for (const { elements } of this.shown.splice(same)) elements.forEach((element) => element.remove());
    for (const block of blocks.slice(same)) {
      const elements = render(block);
      this.element.append(...elements);
      this.shown.push({ text: block, elements });
    }
  }
}
