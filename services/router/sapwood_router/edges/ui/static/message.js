// One turn of a conversation on the page.

import { shownFiles } from "./attach.js";
import { button, copy, el, errorParts } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import { hideTip, tokensOf } from "./tokens.js";

const NAMES = { user: "You", assistant: "Model", tool: "Tool" };
const ENDS = { stop: "", tool_calls: "", length: "cut off: the limit of tokens was reached", content_filter: "held back by a filter" };

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // not all of it is there yet
  }
}

function statsOf({ usage, first, seconds, reason }) {
  const told = [];
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens;
    told.push(`${usage.prompt_tokens} prompt tokens${cached ? ` (${cached} cached)` : ""}`, `${usage.completion_tokens} tokens`);
  }
  if (first !== undefined) told.push(`${first.toFixed(2)} s to the first`);
  if (usage?.completion_tokens > 1 && seconds > first) {
    told.push(`${((usage.completion_tokens - 1) / (seconds - first)).toFixed(1)} tokens/s`);
  }
  if (reason && (ENDS[reason] ?? reason)) told.push(ENDS[reason] ?? reason);
  return told.join(" · ");
}

/**
 * A turn's element, which follows the turn as it grows. `actions` has, each for this turn: `retry()`, `edit(text)`, `answerCalls(results)`,
 * `choose(turn)` (another branch) and `spread()` (branches side by side, or one).
 */
export class MessageView {
  constructor(turn, actions) {
    this.turn = turn;
    this.actions = actions;
    this.thoughts = el("div", { className: "thoughts" });
    this.folded = el("details", { className: "reasoning", hidden: true }, el("summary", {}, "Reasoning"), this.thoughts);
    this.text = el("div", { className: "text" });
    this.markdown = turn.role === "assistant" ? new MarkdownView(this.text) : null;
    this.tokens = el("div", { hidden: true });
    this.calls = el("div", { className: "calls" });
    this.error = el("p", { className: "error", role: "alert", hidden: true });
    this.stats = el("span", { className: "stats" });
    this.tools = el("div", { className: "row actions", hidden: true });
    this.branches = el("span", { className: "switch", hidden: true });
    this.element = el(
      "article",
      { className: `turn ${turn.role}`, "aria-label": NAMES[turn.role] },
      el("p", { className: "who" }, turn.model || NAMES[turn.role], this.branches),
      el("div", { className: "attached" }, ...shownFiles(turn)),
      this.folded, this.text, this.tokens, this.calls, this.error, this.tools,
    );
    this.update();
  }

  /** Shows the turn as it is now. */
  update() {
    const { content, reasoning, tool_calls: calls = [] } = this.turn;
    this.folded.hidden = !reasoning;
    if (reasoning) this.thoughts.textContent = reasoning;
    if (this.markdown) this.markdown.update(content);
    else {
      this.text.textContent = content;
      this.text.hidden = !content && this.turn.role === "user";
    }
    calls.forEach((call, index) => {
      this.calls.children[index] ?? this.calls.append(el("div", { className: "call" }, el("code"), el("pre", { tabIndex: 0 })));
      const [name, given] = this.calls.children[index].children;
      name.textContent = call.function.name;
      given.textContent = pretty(call.function.arguments);
      given.hidden = !/[^{}\s]/.test(call.function.arguments);
    });
  }

  /** Shows the turn as it is in the end. `last`: whether no other follows it; `siblings`: the turns in its place; `spread`: whether all are shown. */
  finish(last, siblings = [this.turn], spread = false) {
    this.update();
    const { error, content, stopped, role } = this.turn;
    this.element.removeAttribute("aria-busy");
    this.error.hidden = !error;
    if (error) this.error.replaceChildren(...errorParts(error));
    this.stats.textContent = [stopped ? "stopped" : "", statsOf(this.turn)].filter(Boolean).join(" · ");
    const answered = role === "assistant";
    const quiet = { className: "quiet" };
    this.tools.hidden = false;
    this.tools.replaceChildren(
      this.stats,
      content ? button("Copy", (event) => copy(this.turn.content, event.currentTarget), quiet) : "",
      content && role !== "tool" ? button("Edit", () => this.edit(), quiet) : "",
      answered && this.turn.tokens ? button("Tokens", (event) => this.showTokens(event.currentTarget), { ...quiet, "aria-pressed": String(!this.tokens.hidden) }) : "",
      answered && siblings.length > 1 ? button(spread ? "One at a time" : "Side by side", () => this.actions.spread(), quiet) : "",
      answered ? button("Retry", () => this.actions.retry(), quiet) : "",
    );
    this.showBranches(siblings, spread);
    this.calls.querySelector("form")?.remove();
    if (last && !error && !stopped && this.turn.tool_calls?.length) this.calls.append(this.resultsForm(this.turn.tool_calls));
  }

  showBranches(siblings, spread) {
    this.branches.hidden = siblings.length < 2;
    const at = siblings.indexOf(this.turn);
    const go = (step, text, name) =>
      button(text, () => this.actions.choose(siblings[at + step]), { className: "quiet", "aria-label": name, disabled: !siblings[at + step] });
    if (spread) this.branches.replaceChildren(button("Continue with this", () => this.actions.choose(this.turn), { className: "quiet pick" }));
    else this.branches.replaceChildren(go(-1, "‹", "The branch before"), `${at + 1} of ${siblings.length}`, go(1, "›", "The next branch"));
  }

  showTokens(pressed) {
    const shown = this.tokens.hidden;
    this.tokens.hidden = !shown;
    this.text.hidden = shown;
    hideTip();
    pressed.setAttribute("aria-pressed", String(shown));
    this.tokens.replaceChildren(...(shown ? [tokensOf(this.turn.tokens)] : []));
  }

  /** Lets the text be changed in place: what was there stays as a branch. */
  edit() {
    const field = el("textarea", { value: this.turn.content, rows: Math.min(12, this.turn.content.split("\n").length + 1), "aria-label": "The turn's text" });
    const done = () => {
      form.remove();
      this.text.hidden = false;
      this.tools.hidden = false;
    };
    const form = el("form", { className: "edit" }, field, el("div", { className: "row" }, button("Cancel", done, { className: "quiet" }),
      el("button", { type: "submit" }, this.turn.role === "user" ? "Send" : "Keep")));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!field.value.trim()) return;
      done();
      this.actions.edit(field.value);
    });
    form.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      done();
    });
    this.text.hidden = true;
    this.tools.hidden = true;
    this.text.after(form);
    field.focus();
  }

  resultsForm(calls) {
    const fields = calls.map((call, index) => {
      const name = `Result of ${call.function.name}${calls.length > 1 ? `, call ${index + 1}` : ""}`;
      return el("textarea", { rows: 1, className: "code", "aria-label": name, placeholder: `${name}: text or JSON` });
    });
    const form = el("form", { className: "results" }, ...fields, el("div", { className: "row" },
      el("button", { type: "submit" }, calls.length > 1 ? "Send results" : "Send result")));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.actions.answerCalls(calls.map((call, index) => ({ id: call.id, content: fields[index].value })));
    });
    return form;
  }
}
