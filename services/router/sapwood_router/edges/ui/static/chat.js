// The conversation that is shown: what was said, what is being answered, and the form that continues it.

import { stream } from "./api.js";
import { Attachments } from "./attach.js";
import { Conversation } from "./conversation.js";
import { ConversationList } from "./conversations.js";
import { byId, el } from "./dom.js";
import { MessageView } from "./message.js";
import { markField, modelsAsked, requestOf } from "./settings.js";
import { all, forget, here, keep, tidy } from "./store.js";
import { takeTokens } from "./tokens.js";

const MOST_CALLS = 128;
const NEAR = 80; // pixels from the end within which the view follows it
const KEEP_MS = 1000; // while an answer comes

/** Adds what an event brings to the turn it answers; returns whether it brought any output. */
function take(turn, event) {
  if (event.usage) turn.usage = event.usage;
  const choice = event.choices[0];
  if (!choice) return false;
  turn.reason = choice.finish_reason ?? turn.reason;
  takeTokens(turn, choice);
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
    this.running = new Map(); // of each turn that is being answered, what stops it
    this.wide = new Set(); // the turns whose answers are shown side by side
    this.attachments = new Attachments();
    this.list = new ConversationList({
      open: (kept) => this.open(new Conversation(kept)),
      removed: (id) => id === this.conversation.id && this.clear(),
      imported: async () => this.list.show(await all(), this.conversation.id),
    });
    const before = here.get();
    this.open(new Conversation());
    this.before = before;
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
    addEventListener("pagehide", () => this.stopAll());
    byId("clear").addEventListener("click", () => this.clear());
    byId("log").addEventListener("scroll", () => (byId("token-tip").hidden = true));
  }

  /** Shows what this tab showed before it was loaded again, and the list of conversations. */
  async load() {
    await tidy();
    const kept = await all();
    const before = kept.find(({ id }) => id === this.before);
    if (before && !this.conversation.turns.length) this.open(new Conversation(before));
    this.list.show(kept, this.conversation.id);
  }

  open(conversation) {
    this.stop();
    this.conversation = conversation;
    this.views = new Map();
    this.wide.clear();
    here.set(conversation.id);
    this.show();
    this.toEnd();
    this.list.mark(conversation.id);
  }

  /** The conversation as the API takes it. */
  messages() {
    return this.conversation.messages();
  }

  send() {
    const text = byId("text").value;
    if (this.running.size || !(text.trim() || this.attachments.any)) return;
    byId("text").value = "";
    byId("text").focus(); // the button that was pressed is gone while the answer comes
    this.say({ role: "user", content: text, ...this.attachments.taken() });
    this.answer();
  }

  stop() {
    for (const controller of this.running?.values() ?? []) controller.abort();
  }

  /** The page goes: what there is of the answers is kept. */
  stopAll() {
    if (!this.running.size) return;
    for (const number of this.running.keys()) {
      const turn = this.conversation.turn(number);
      turn.stopped = true;
      delete turn.tool_calls;
    }
    this.keep();
  }

  /** Begins another conversation. */
  clear() {
    this.open(new Conversation());
    this.attachments.clear();
    byId("text").focus();
  }

  /** Forgets all conversations: the next person at this browser need not read them. */
  async forget() {
    this.clear();
    await forget();
    this.list.show([], this.conversation.id);
  }

  /** Asks for another answer in the place of one. */
  retry(turn) {
    if (this.running.size) return;
    const { parent, model } = turn;
    if (!turn.content && !turn.tool_calls) this.conversation.drop(turn);
    this.conversation.last = parent;
    this.answer(model ? [model] : undefined);
  }

  /** Puts another text in the place of a turn's; a question is asked at once. */
  edit(turn, content) {
    if (this.running.size) return;
    const { role, files, pictures, model, parent } = turn;
    this.conversation.add({ role, content, ...(files && { files }), ...(pictures && { pictures }), ...(model && { model }) }, parent);
    this.show();
    this.keep();
    if (role === "user") this.answer();
  }

  answerCalls(results) {
    if (this.running.size) return;
    const { model } = this.conversation.turn(this.conversation.last);
    for (const { id, content } of results) this.say({ role: "tool", tool_call_id: id, content });
    this.answer(model ? [model] : undefined);
  }

  say(turn) {
    this.conversation.add(turn);
    this.show();
    this.keep();
    this.toEnd();
  }

  /** Asks each model for an answer to what is shown; of several, the first one's is continued unless another is chosen. */
  async answer(models = modelsAsked()) {
    const parent = this.conversation.last;
    const messages = this.messages();
    const turns = models.map((model, index) => this.conversation.add({ role: "assistant", content: "", model }, parent, index > 0));
    if (turns.length > 1) this.wide.add(parent);
    markField(null);
    for (const { number } of turns) this.running.set(number, new AbortController());
    this.show();
    this.showRunning();
    this.toEnd();
    await Promise.all(turns.map((turn) => this.answerOne(turn, messages)));
  }

  async answerOne(turn, messages) {
    const { conversation } = this;
    const controller = this.running.get(turn.number);
    const asked = performance.now();
    const seconds = () => (performance.now() - asked) / 1000;
    try {
      const request = { ...requestOf(messages, turn.model), stream: true, stream_options: { include_usage: true } };
      for await (const event of stream("../v1/chat/completions", request, controller.signal)) {
        if (take(turn, event) && turn.first === undefined) turn.first = seconds();
        this.showSoon();
      }
    } catch (error) {
      this.fail(turn, error);
    }
    turn.seconds = seconds();
    this.running.delete(turn.number);
    if (this.conversation === conversation) this.follow(() => this.show());
    this.showRunning();
    this.keep(conversation);
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

  viewOf(turn) {
    if (!this.views.has(turn.number)) {
      const actions = {
        retry: () => this.retry(turn),
        edit: (text) => this.edit(turn, text),
        answerCalls: (results) => this.answerCalls(results),
        choose: (other) => this.choose(other),
        spread: () => this.spread(turn.parent),
      };
      this.views.set(turn.number, new MessageView(turn, actions));
    }
    const view = this.views.get(turn.number);
    if (this.running.has(turn.number)) view.element.setAttribute("aria-busy", "true");
    else {
      const siblings = this.conversation.siblings(turn);
      view.finish(turn.number === this.conversation.last, siblings, turn.role === "assistant" && siblings.length > 1 && this.wide.has(turn.parent));
    }
    return view;
  }

  /** Shows another branch. */
  choose(turn) {
    if (this.running.size) return;
    this.wide.delete(turn.parent);
    this.conversation.choose(turn);
    this.show();
    this.keep();
  }

  /** Shows the answers to one turn side by side, or one at a time. */
  spread(parent) {
    if (this.running.size) return;
    if (!this.wide.delete(parent)) this.wide.add(parent);
    this.show();
  }

  show() {
    const shown = this.conversation.path().map((turn) => {
      const siblings = this.conversation.siblings(turn);
      const element = this.viewOf(turn).element;
      const wide = turn.role === "assistant" && siblings.length > 1 && this.wide.has(turn.parent);
      if (!wide) {
        element.classList.remove("chosen");
        return element;
      }
      const columns = siblings.map((each) => this.viewOf(each).element);
      for (const column of columns) column.classList.toggle("chosen", column === element);
      return el("div", { className: "branches", role: "group", "aria-label": `${siblings.length} answers side by side` }, ...columns);
    });
    const empty = el("p", { className: "empty" }, "Nothing said yet. What is said here stays in this browser.");
    this.log.replaceChildren(...(shown.length ? shown : [empty]));
  }

  /** Shows the turns that grow with the next frame, however many events come until then. */
  showSoon() {
    if (!this.keeping) {
      this.keeping = setTimeout(() => {
        this.keeping = null;
        if (this.running.size) this.keep();
      }, KEEP_MS);
    }
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      this.follow(() => {
        for (const number of this.running.keys()) this.views.get(number)?.update();
      });
    });
  }

  toEnd() {
    this.log.scrollTop = this.log.scrollHeight;
  }

  /** Does something to the log, and stays at its end if it was there. */
  follow(change) {
    const atEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < NEAR;
    const at = this.log.scrollTop;
    change();
    this.log.scrollTop = atEnd ? this.log.scrollHeight : at;
  }

  showRunning() {
    byId("stop").hidden = !this.running.size;
    byId("send").hidden = this.running.size > 0;
  }

  async keep(conversation = this.conversation) {
    if (!conversation.turns.length) return;
    const taken = await keep(conversation.toJSON());
    byId("not-kept").hidden = taken;
    if (!this.running.size) this.list.show(await all(), this.conversation.id);
  }
}
