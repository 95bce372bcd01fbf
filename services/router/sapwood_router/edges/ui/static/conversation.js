// A conversation: a tree of turns. What is edited or asked for again becomes a branch; one path through the tree is shown.

const TITLE = 60; // letters

/** Puts files before a text, each in a fence that its own text cannot close. */
function withFiles(text, files = []) {
  const parts = files.map(({ name, text: inside }) => {
    const longest = Math.max(2, ...[...inside.matchAll(/`+/g)].map(([ticks]) => ticks.length));
    const fence = "`".repeat(longest + 1);
    return `File ${name}:\n${fence}\n${inside}\n${fence}`;
  });
  return [...parts, text].filter(Boolean).join("\n\n");
}

/** A turn as the API takes it. */
function messageOf({ role, content, tool_calls, tool_call_id, files, pictures }) {
  if (role === "tool") return { role, tool_call_id, content };
  if (role !== "user") return { role, content, tool_calls: tool_calls?.map(({ index, ...call }) => call) };
  const text = withFiles(content, files);
  if (!pictures?.length) return { role, content: text };
  const shown = pictures.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return { role, content: [...shown, ...(text ? [{ type: "text", text }] : [])] };
}

const newId = () => `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 10)}`;

export class Conversation {
  /** `kept`: as `toJSON` made it. */
  constructor(kept = {}) {
    this.id = kept.id ?? newId();
    this.turns = kept.turns ?? []; // each has a `number` (from 1) and its `parent`'s, 0 for the first
    this.last = kept.last ?? 0; // the end of the path that is shown
    this.next = Math.max(0, ...this.turns.map(({ number }) => number)) + 1;
  }

  toJSON() {
    return { id: this.id, title: this.title, turns: this.turns, last: this.last };
  }

  get title() {
    const first = this.path().find(({ role }) => role === "user");
    const text = first ? first.content.trim() || first.files?.[0]?.name || first.pictures?.[0]?.name || "" : "";
    return text.length > TITLE ? `${text.slice(0, TITLE)}…` : text || "New chat";
  }

  turn(number) {
    return this.turns.find((turn) => turn.number === number);
  }

  /** The turns from the first one to `last`. */
  path(last = this.last) {
    const found = [];
    for (let turn = this.turn(last); turn; turn = this.turn(turn.parent)) found.unshift(turn);
    return found;
  }

  /** The turns in the same place, this one among them: what was asked or answered there instead. */
  siblings({ parent }) {
    return this.turns.filter((turn) => turn.parent === parent);
  }

  /** Adds a turn after another, and shows it unless `aside`. */
  add(turn, parent = this.last, aside = false) {
    const made = Object.assign(turn, { number: this.next++, parent });
    this.turns.push(made);
    if (!aside) this.last = made.number;
    return made;
  }

  /** Shows the branch that a turn is in, to its end; of several ends, the latest. */
  choose(turn) {
    let end = turn;
    for (let later = turn; later; later = this.turns.findLast(({ parent }) => parent === end.number)) end = later;
    this.last = end.number;
  }

  /** Removes a turn, unless others follow it. */
  drop(turn) {
    if (this.turns.some(({ parent }) => parent === turn.number)) return;
    this.turns = this.turns.filter((each) => each !== turn);
    if (this.last === turn.number) this.last = turn.parent;
  }

  /** What was said until a turn, as the API takes it: without what got no answer, as templates want turns to alternate. */
  messages(last = this.last) {
    const said = [];
    for (const turn of this.path(last)) {
      if (turn.role !== "assistant" || turn.content || turn.tool_calls) said.push(messageOf(turn));
      else if (said.at(-1)?.role === "user") said.pop();
    }
    return said;
  }
}
