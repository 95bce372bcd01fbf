// Conversations that this page exported, read from a file. Only what the page itself would have written is taken.

import { Conversation } from "./conversation.js";

const MOST_FILE = 64 * 1024 * 1024; // bytes
const PICTURE = /^data:image\/(png|jpeg|gif|webp|bmp|avif|tiff);base64,[A-Za-z0-9+/]+=*$/;

/** Each of these takes a value and its name; returns what is kept of it, or raises Error with the name. */
const wrong = (name, expected) => new Error(`${name}: expected ${expected}`);
const string = (value, name) => {
  if (typeof value !== "string") throw wrong(name, "a text");
  return value;
};
const number = (value, name) => {
  if (!Number.isFinite(value)) throw wrong(name, "a number");
  return value;
};
const count = (value, name) => {
  if (!Number.isSafeInteger(value) || value < 0) throw wrong(name, "a whole number from 0");
  return value;
};
const yes = (value, name) => {
  if (typeof value !== "boolean") throw wrong(name, "true or false");
  return value;
};
const oneOf = (...names) => (value, name) => {
  if (!names.includes(value)) throw wrong(name, names.join(", "));
  return value;
};
const picture = (value, name) => {
  if (typeof value !== "string" || !PICTURE.test(value)) throw wrong(name, "a picture as data:image/…;base64");
  return value;
};
const list = (of) => (value, name) => {
  if (!Array.isArray(value)) throw wrong(name, "a list");
  return value.map((each, index) => of(each, `${name}[${index}]`));
};
const tuple = (...of) => (value, name) => {
  if (!Array.isArray(value) || value.length !== of.length) throw wrong(name, `a list of ${of.length}`);
  return value.map((each, index) => of[index](each, `${name}[${index}]`));
};
const object = (needed, others = {}) => (value, name) => {
  if (typeof value !== "object" || value === null || Array.isArray(value)) throw wrong(name, "an object");
  const taken = {};
  for (const [key, of] of Object.entries(needed)) taken[key] = of(value[key], `${name}.${key}`);
  for (const [key, of] of Object.entries(others)) if (value[key] !== undefined && value[key] !== null) taken[key] = of(value[key], `${name}.${key}`);
  return taken;
};

/** The numbers of an object, and of the objects in it. */
const counts = (value, name) => {
  object({})(value, name);
  const taken = Object.entries(value).filter(([, each]) => Number.isFinite(each) || (typeof each === "object" && each !== null));
  return Object.fromEntries(taken.map(([key, each]) => [key, Number.isFinite(each) ? each : counts(each, `${name}.${key}`)]));
};
const counted = object({ prompt_tokens: count, completion_tokens: count });
const called = object({ function: object({ name: string, arguments: string }) }, { id: string, index: count });
const likely = list(tuple(string, number));
const turn = object(
  { number: count, parent: count, role: oneOf("user", "assistant", "tool"), content: string },
  {
    model: string, reasoning: string, reason: string, tool_call_id: string, stopped: yes, first: number, seconds: number,
    error: object({ message: string }, { field: string, status: count }),
    usage: (value, name) => ({ ...counts(value, name), ...counted(value, name) }),
    tool_calls: list((value, name) => ({ ...called(value, name), type: "function" })),
    tokens: list(tuple(string, number, likely)),
    files: list(object({ name: string, text: string })),
    pictures: list(object({ name: string, url: picture })),
  },
);
const kept = object({ turns: list(turn), last: count });

function conversation(value, name) {
  const { turns, last } = kept(value, name);
  const known = new Set([0]);
  turns.forEach((each, index) => {
    if (known.has(each.number)) throw wrong(`${name}.turns[${index}].number`, "one that no earlier turn has, from 1");
    if (!known.has(each.parent)) throw wrong(`${name}.turns[${index}].parent`, "0 or an earlier turn's number");
    known.add(each.number);
  });
  if (!known.has(last)) throw wrong(`${name}.last`, "a turn's number");
  return new Conversation({ turns, last }); // with an id of its own: none that is here is overwritten
}

/** A text that conversations of the same turns have in common. */
export function fingerprint({ turns }) {
  try {
    return JSON.stringify(list(turn)(turns, "turns"));
  } catch {
    return null; // of an older version of the page
  }
}

/** The conversations of a file that "Export all" or "Export" wrote. Raises Error, with the file's name, where it is no such file. */
export async function readConversations(file) {
  const size = (bytes) => `${(bytes / 1024 / 1024).toFixed(1)} MB`;
  if (file.size > MOST_FILE) throw new Error(`${file.name} has ${size(file.size)}, the most is ${size(MOST_FILE)}: export conversations one by one`);
  let read;
  try {
    read = JSON.parse(await file.text());
  } catch (error) {
    throw new Error(error instanceof SyntaxError ? `${file.name} is not JSON: ${error.message}` : `${file.name} cannot be read`);
  }
  try {
    if (Array.isArray(read?.turns)) return [conversation(read, "the conversation")];
    if (Array.isArray(read?.conversations)) return read.conversations.map((each, index) => conversation(each, `conversations[${index}]`));
  } catch (error) {
    throw new Error(`${file.name}: ${error.message}`);
  }
  throw new Error(`${file.name} is no export of this page: it has neither conversations nor turns`);
}
