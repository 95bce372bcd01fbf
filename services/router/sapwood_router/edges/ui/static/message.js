// One turn of a conversation on the page.

import { button, copy, el, errorParts } from "./dom.js";
import { MarkdownView } from "./markdown.js";

const NAMES = { user: "You", assistant: "Model", tool: "Tool" };

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
  if (reason && reason !== "stop") told.push(reason);
  return told.join(" · ");
}

/** A turn's element, which follows the turn as it grows. `actions` has `retry()` and `answerCalls(results)`. */
export class MessageView {
  constructor(turn, actions) {
    this.turn = turn;
    this.actions = actions;
    this.thoughts = el("div", { className: "thoughts" });
    this.folded = el("details", { className: "reasoning", hidden: true }, el("summary", {}, "Reasoning"), this.thoughts);
    this.text = el("div", { className: "text" });
    this.markdown = turn.role === "assistant" ? new MarkdownView(this.text) : null;
    this.calls = el("div", { className: "calls" });
    this.error = el("p", { className: "error", role: "alert", hidden: true });
    this.stats = el("span", { className: "stats" });
    this.tools = el("div", { className: "row actions", hidden: true });
    this.element = el(
      "article",
      { className: `turn ${turn.role}`, "aria-label": NAMES[turn.role] },
      el("p", { className: "who" }, NAMES[turn.role]),
      this.folded, this.text, this.calls, this.error, this.tools,
    );
    this.update();
  }

  /** Shows the turn as it is now. */
  update() {
    const { content, reasoning, tool_calls: calls = [] } = this.turn;
    this.folded.hidden = !reasoning;
    if (reasoning) this.thoughts.textContent = reasoning;
    if (this.markdown) this.markdown.update(content);
    else this.text.textContent = content;
    calls.forEach((call, index) => {
      this.calls.children[index] ?? this.calls.append(el("div", { className: "call" }, el("code"), el("pre", { tabIndex: 0 })));
      const [name, given] = this.calls.children[index].children;
      name.textContent = call.function.name;
      given.textContent = pretty(call.function.arguments);
    });
  }

  /** Shows the turn as it is in the end. `last`: whether no other follows it. */
  finish(last) {
    this.update();
    const { error, content, stopped } = this.turn;
    this.element.removeAttribute("aria-busy");
    this.error.hidden = !error;
    if (error) this.error.replaceChildren(...errorParts(error));
    this.stats.textContent = [stopped ? "stopped" : "", statsOf(this.turn)].filter(Boolean).join(" · ");
    const answered = this.turn.role === "assistant";
    this.tools.hidden = false;
    this.tools.replaceChildren(
      this.stats,
      content ? button("Copy", (event) => copy(this.turn.content, event.currentTarget), { className: "quiet" }) : "",
      answered && last ? button("Retry", this.actions.retry, { className: "quiet" }) : "",
    );
    this.calls.querySelector("form")?.remove();
    if (last && !error && !stopped && this.turn.tool_calls?.length) this.calls.append(this.resultsForm(this.turn.tool_calls));
  }

  /** The end of what was the last turn: it can no longer be tried again. */
  settle() {
    this.finish(false);
  }

  resultsForm(calls) {
    const fields = calls.map((call) => el("textarea", { rows: 2, className: "code", "aria-label": `Result of ${call.function.name}` }));
    const form = el(
      "form",
      { className: "results" },
      ...fields.flatMap((field, index) => [el("span", { className: "hint" }, `Result of ${calls[index].function.name}`), field]),
      el("div", { className: "row" }, el("button", { type: "submit" }, calls.length > 1 ? "Send results" : "Send result")),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.actions.answerCalls(calls.map((call, index) => ({ id: call.id, content: fields[index].value })));
    });
    return form;
  }
}
