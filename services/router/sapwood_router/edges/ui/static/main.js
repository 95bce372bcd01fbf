// The page: which view is shown, the key, and the look at the router each second.

import { forgetKey, get, getKey, setKey } from "./api.js";
import { CacheView } from "./cache.js";
import { Chat } from "./chat.js";
import { byId, setText, showError } from "./dom.js";
import { Fleet } from "./fleet.js";
import { explainRoutes } from "./route.js";
import { keepSettings, offerModels } from "./settings.js";
import { TraceView } from "./trace.js";

const VIEWS = ["chat", "fleet", "route", "cache", "trace"];
const LOOK_MS = 1000; // while the fleet is shown
const GLANCE_MS = 5000; // else: for the models and the router's health

let locked = false;
let timer = null;
let looking = false;
let loaded = false; // the conversations of the key

const viewNow = () => (VIEWS.includes(location.hash.slice(1)) ? location.hash.slice(1) : "chat");

function show() {
  byId("key-view").hidden = !locked;
  for (const view of VIEWS) byId(`${view}-view`).hidden = locked || view !== viewNow();
  for (const link of document.querySelectorAll("nav a")) {
    link.hidden = locked;
    if (link.hash.slice(1) === viewNow()) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  byId("forget-key").hidden = locked || !getKey();
}

/** Asks for a key: nothing else is shown until there is one that the router takes. */
function lock(error) {
  const wrong = getKey() !== null;
  locked = true;
  forgetKey();
  setText(byId("health"), "");
  byId("fleet").replaceChildren();
  showError(byId("key-error"), wrong ? error : null);
  show();
  byId("key").focus();
}

function showHealth({ models, router }) {
  const up = router?.workers.filter((worker) => worker.state === "up").length;
  const told = router ? `${up} of ${router.workers.length} workers up` : models.length ? "serving" : "no model yet";
  setText(byId("health"), router?.problem ? "cannot serve" : told);
  const good = router ? !router.problem : models.length > 0;
  byId("health").className = !good ? "bad" : router && up < router.workers.length ? "some" : "good";
}

async function look() {
  clearTimeout(timer);
  if (looking || document.hidden) return;
  looking = true;
  try {
    const state = await get("fleet");
    const unlocked = locked;
    locked = false;
    offerModels(state.models);
    fleet.update(state);
    showHealth(state);
    byId("route-form").hidden = state.router === null;
    byId("route-closed").hidden = state.router !== null;
    for (const closed of document.querySelectorAll(".closed")) closed.hidden = state.router !== null;
    if (state.router) await views[viewNow()]?.look();
    byId("fleet").classList.remove("old");
    showError(byId("fleet-error"), null);
    showError(byId("key-error"), null);
    if (unlocked) byId("key").value = "";
    show();
    if (!loaded || unlocked) {
      loaded = true;
      await chat.load();
    }
    if (unlocked && viewNow() === "chat") byId("text").focus();
  } catch (error) {
    if (error.status === 401) lock(error);
    else {
      setText(byId("health"), error.message);
      byId("health").className = "bad";
      byId("fleet").classList.add("old");
      showError(byId("fleet-error"), error);
      if (!locked) show();
    }
  }
  looking = false;
  if (!locked) timer = setTimeout(look, viewNow() === "fleet" || viewNow() in views ? LOOK_MS : GLANCE_MS);
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = byId("key").value.trim();
  if (/^[\x21-\x7e]+$/.test(key)) {
    setKey(key);
    look();
  } else showError(byId("key-error"), { message: "a key has neither spaces nor letters beyond ASCII" });
});
byId("forget-key").addEventListener("click", async () => {
  await chat.forget();
  forgetKey();
  look();
});
addEventListener("hashchange", () => {
  show();
  look();
});
document.addEventListener("visibilitychange", look);

keepSettings();
const chat = new Chat(lock);
const fleet = new Fleet();
const views = { fleet: fleet.history, cache: new CacheView(), trace: new TraceView() };
explainRoutes(chat, lock);
look();
