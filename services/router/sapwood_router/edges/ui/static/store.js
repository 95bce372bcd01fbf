// The conversations, in this browser's IndexedDB. Where the router asks for keys, each key sees its own.

import { getKey } from "./api.js";

const NAME = "sapwood";
const KIND = "conversations";
const NOW = "sapwood-now"; // in the tab: which conversation it shows
export const MOST = 500; // conversations; the oldest go

/** A fingerprint of the key, too short to find the key by; empty without one. */
function owner() {
  const key = getKey();
  if (!key) return "";
  let sum = 0x811c9dc5;
  for (const letter of key) sum = Math.imul(sum ^ letter.codePointAt(0), 0x01000193) >>> 0;
  return (sum & 0xffff).toString(16);
}

const asked = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

let opened = null;
function open() {
  opened ??= (async () => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(KIND, { keyPath: "id" });
    return asked(request);
  })();
  return opened;
}

/** Runs one request on the store; null where the browser keeps nothing (a private window, a full disk). */
async function on(mode, ask) {
  try {
    return await asked(ask((await open()).transaction(KIND, mode).objectStore(KIND)));
  } catch {
    return null;
  }
}

/** All conversations of the present key, the latest first. */
export async function all() {
  const found = (await on("readonly", (store) => store.getAll())) ?? [];
  return found.filter((each) => each.owner === owner()).sort((one, other) => other.changed - one.changed);
}

/** Keeps a conversation; returns whether the browser took it. */
export async function keep(conversation) {
  return (await on("readwrite", (store) => store.put({ ...conversation, owner: owner(), changed: Date.now() }))) !== null;
}

export const remove = (id) => on("readwrite", (store) => store.delete(id));

/** Removes what is more than a browser should keep. */
export async function tidy() {
  for (const { id } of (await all()).slice(MOST)) await remove(id);
}

/** Removes all conversations of the present key. */
export async function forget() {
  for (const { id } of await all()) await remove(id);
}

/** Which conversation this tab shows. */
export const here = {
  get: () => sessionStorage.getItem(NOW),
  set: (id) => sessionStorage.setItem(NOW, id),
};
