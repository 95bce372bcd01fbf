// The conversation: what was said, what is being answered, and the form that goes on with it. Kept in the tab.

import { stream } from "./api.js";
import { byId, el } from "./dom.js";
import { MessageView } from "./message.js";
import { markField, requestOf } from "./settings.js";

const STORE = "sapwood-chat";
const MOST_CALLS = 128;
const NEAR = 80; // pixels from the end within which the view follows it

/** A turn as the API takes it. */
function messageOf({ role, content, tool_calls, tool_call_id }) {
  if (role === "tool") return { role, tool_call_id, content };
  return { role, content, tool_calls };
}

/** Adds what an event brings to the turn it answers; returns whether it brought any output. */
function take(turn, event) {
  if (event.usage) turn.usage = event.usage;
  const choice = event.choices[0];
  if (!choice) return false;
  turn.reason = choice.finish_reason ?? turn.reason;
  const { content, reasoning_content: reasoning, tool_calls: calls = [] } = choice.delta;
  turn.content += content ?? "";
  if (reasoning) turn.reasoning = (turn.reasoning ?? "") + reasoning;
  for (const part of calls) {
    turn.tool_calls ??= [];
    let call = turn.tool_calls.find(({ index }) => index === part.index); // a backend chooses the index: it is no place in a list
    if (!call) {
      if (turn.tool_calls.length === MOST_CALLS) throw new Error(`the answer has more than ${MOST_CALLS} calls`);
      call = { index: part.index, id: part.id, type: "function", function: { name: part.function?.name ?? "", arguments: "" } };
      turn.tool_calls.push(call);
    }
    call.function.arguments += part.function?.arguments ?? "";
  }
  return Boolean(content || reasoning || calls.length);
}

export class Chat {
  /** `onUnauthorised`: called with the error of a request whose key was not taken. */
  constructor(onUnauthorised) {
    this.onUnauthorised = onUnauthorised;
    this.log = byId("log");
    this.views = [];
    this.running = null;
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("text").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    byId("chat-view").addEventListener("keydown", (event) => event.key === "Escape" && this.stop());
    byId("stop").addEventListener("click", () => {
      byId("text").focus();
      this.stop();
    });
    addEventListener("pagehide", () => this.stopAt(this.views.at(-1)));
    byId("clear").addEventListener("click", () => this.clear());
    for (const turn of JSON.parse(sessionStorage.getItem(STORE) ?? "[]")) this.add(turn).finish(false);
    this.views.at(-1)?.finish(true);
    this.showEmpty();
    this.log.scrollTop = this.log.scrollHeight;
  }

  /** The conversation as the API takes it: without what got no answer, as templates want turns to alternate. */
  messages() {
    const said = [];
    for (const { turn } of this.views) {
      if (turn.role !== "assistant" || turn.content || turn.tool_calls) said.push(messageOf(turn));
      else if (said.at(-1)?.role === "user") said.pop();
    }
    return said;
  }

  send() {
    const text = byId("text").value;
    if (this.running || !text.trim()) return;
    byId("text").value = "";
    byId("text").focus(); // the button that was pressed is gone while the answer comes
    this.say({ role: "user", content: text });
    this.answer();
  }

  stop() {
    this.running?.abort();
  }

  /** The page goes: what there is of the answer is kept. */
  stopAt(view) {
    if (!this.running) return;
    view.turn.stopped = true;
    delete view.turn.tool_calls;
    this.keep();
  }

  clear() {
    this.stop();
    this.views = [];
    this.log.replaceChildren();
    this.keep();
    this.showEmpty();
    byId("text").focus();
  }

  /** Asks for the last answer anew. */
  retry() {
    if (this.running) return;
    this.views.pop()?.element.remove();
    this.answer();
  }

  answerCalls(results) {
    if (this.running) return;
    for (const { id, content } of results) this.say({ role: "tool", tool_call_id: id, content });
    this.answer();
  }

  say(turn) {
    this.views.at(-1)?.settle();
    this.add(turn).finish(false);
    this.keep();
    this.log.scrollTop = this.log.scrollHeight;
  }

  async answer() {
    const turn = { role: "assistant", content: "" };
    const messages = this.messages();
    const view = this.add(turn);
    view.element.setAttribute("aria-busy", "true");
    this.running = new AbortController();
    this.showRunning();
    this.log.scrollTop = this.log.scrollHeight;
    markField(null);
    const asked = performance.now();
    const seconds = () => (performance.now() - asked) / 1000;
    try {
      const request = { ...requestOf(messages), stream: true, stream_options: { include_usage: true } };
      for await (const event of stream("../v1/chat/completions", request, this.running.signal)) {
        if (take(turn, event) && turn.first === undefined) turn.first = seconds();
        this.showSoon(view);
      }
    } catch (error) {
      this.fail(turn, error);
    }
    turn.seconds = seconds();
    this.running = null;
    this.follow(() => view.finish(true));
    this.showRunning();
    if (this.views.includes(view)) this.keep();
  }

  fail(turn, error) {
    if (error.name === "AbortError") {
      turn.stopped = true;
      delete turn.tool_calls; // half a call is none
      return;
    }
    turn.error = { message: error.message, field: error.field, status: error.status };
    markField(error.field);
    if (error.status === 401) this.onUnauthorised(error);
  }

  add(turn) {
    const view = new MessageView(turn, { retry: () => this.retry(), answerCalls: (results) => this.answerCalls(results) });
    this.views.push(view);
    if (this.views.length === 1) this.log.replaceChildren();
    this.log.append(view.element);
    return view;
  }

  /** Shows a turn with the next frame, however many events come until then. */
  showSoon(view) {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      if (this.running) this.follow(() => view.update());
    });
  }

  /** Does something to the log, and stays at its end if it was there. */
  follow(change) {
    const atEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < NEAR;
    change();
    if (atEnd) this.log.scrollTop = this.log.scrollHeight;
  }

  showRunning() {
    byId("stop").hidden = !this.running;
    byId("send").hidden = Boolean(this.running);
  }

  showEmpty() {
    if (!this.views.length) {
      this.log.replaceChildren(el("p", { className: "empty" }, "Nothing said yet. What is said here stays in this tab."));
    }
  }

  keep() {
    try {
      sessionStorage.setItem(STORE, JSON.stringify(this.views.map((view) => view.turn)));
    } catch {
      sessionStorage.removeItem(STORE); // it is longer than a tab may keep
    }
  }
}
