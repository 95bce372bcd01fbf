// The latest requests, and of each which service had it when.

import { ApiError, get } from "./api.js";
import { button, byId, el, showError } from "./dom.js";
import { whyChosen } from "./route.js";

const ms = (seconds) => (seconds < 1 ? `${(1000 * seconds).toFixed(seconds < 0.01 ? 2 : 0)} ms` : `${seconds.toFixed(2)} s`);
const SAID = {
  prepare: "text to tokens", queue: "waits for a worker with room", select: "chooses the worker", acquire: "takes a place there", build: "writes the message",
  dispatch: "sends it", execute: "computes", prefill: "computes the prompt, for another worker", transfer: "the cache is read by the other worker", decode: "generates", respond: "writes the answer",
};

/** The bars of a request: its stages, with the worker's time cut at the first token. */
function barsOf({ stages, first_token: first, completion_tokens: tokens }) {
  return stages.flatMap((stage) => {
    const end = stage.start + stage.seconds;
    if (stage.name !== "execute" || first === null || first <= stage.start || first >= end) return [{ ...stage, said: SAID[stage.name] ?? stage.name }];
    return [
      { ...stage, name: "first token", seconds: first - stage.start, said: "waits in the worker's queue and computes the prompt" },
      { ...stage, name: "tokens", start: first, seconds: end - first, said: `generates ${tokens} tokens` },
    ];
  });
}

export class TraceView {
  constructor() {
    this.asked = 0;
    this.chosen = null;
  }

  async look() {
    if (performance.now() - this.asked < 2000) return;
    this.asked = performance.now();
    try {
      const { requests } = await get("traces");
      showError(byId("trace-error"), null);
      this.requests = requests;
      this.show();
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      showError(byId("trace-error"), error);
    }
  }

  show() {
    const requests = this.requests;
    if (!requests.length) return byId("trace").replaceChildren(el("p", { className: "hint" }, "No request has ended yet. Chat, and look again."));
    const chosen = requests.find((each) => each.request_id === this.chosen?.request_id && each.at === this.chosen.at) ?? (this.chosen ? this.chosen : requests[0]);
    const focus = document.activeElement?.dataset?.id;
    const list = el("ol", { className: "requests", "aria-label": "Requests" }, ...requests.map((each) => {
      const pick = () => {
        this.chosen = each;
        this.show();
        byId("trace").querySelector(`[data-id="${CSS.escape(each.request_id)}"]`)?.focus();
      };
      const item = button("", pick, { className: `quiet ${each === chosen ? "chosen" : ""}`, "data-id": each.request_id, "aria-pressed": String(each === chosen) });
      item.append(el("time", {}, new Date(each.at * 1000).toLocaleTimeString()), el("span", {}, `${each.model} · ${each.completion_tokens} tokens`), el("strong", {}, ms(each.seconds)),
        each.status === "OK" ? "" : el("span", { className: "broken" }, each.status.toLowerCase().replaceAll("_", " ")));
      return el("li", {}, item);
    }));
    byId("trace").replaceChildren(list, this.timeline(chosen));
    if (focus) byId("trace").querySelector(`[data-id="${CSS.escape(focus)}"]`)?.focus();
  }

  timeline(request) {
    const whole = Math.max(request.seconds, ...request.stages.map(({ start, seconds }) => start + seconds), 1e-6);
    const rows = barsOf(request).map((bar) => {
      const fill = el("span", { className: `bar-of ${bar.service}` });
      fill.style.left = `${(100 * bar.start) / whole}%`;
      fill.style.width = `${Math.max(0.3, (100 * bar.seconds) / whole)}%`;
      return el("tr", {}, el("th", { scope: "row" }, el("span", { className: `service ${bar.service}` }, bar.service), bar.worker ? el("span", { className: "hint address" }, bar.worker) : ""),
        el("td", {}, bar.name, el("span", { className: "hint" }, ` ${bar.said}`)), el("td", { className: "track" }, fill), el("td", { className: "number" }, ms(bar.seconds)));
    });
    const facts = [`${request.prompt_tokens.toLocaleString()} prompt tokens, ${request.cached_tokens.toLocaleString()} cached`, `${request.completion_tokens.toLocaleString()} generated`,
      `${request.worker}: ${whyChosen(request.reason)}`, request.resumptions ? `resumed ${request.resumptions} times` : "",
      request.first_token === null ? "" : `first token after ${ms(request.first_token)}`, request.trace ? `trace ${request.trace}` : ""].filter(Boolean);
    return el("div", { className: "timeline" }, el("h2", {}, request.request_id), el("p", { className: "hint" }, facts.join(" · ")),
      el("div", { className: "wide-box" }, el("table", { className: "bars", "aria-label": "Which service had the request when" },
        el("thead", {}, el("tr", {}, ...["Service", "Stage", `0 to ${ms(whole)}`, "Time"].map((name) => el("th", { scope: "col" }, name)))), el("tbody", {}, ...rows))));
  }
}
