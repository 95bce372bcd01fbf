// The workers, live: rows that change in place.

import { byId, el, setText } from "./dom.js";
import { History } from "./history.js";

const SVG = "http://www.w3.org/2000/svg";
const REMEMBERED = 60; // looks, one a second
const COLUMNS = ["Worker", "State", "Breaker", "Running", "Waiting", "Cache in use", "Hit rate", "Tokens/s"];

const percent = (share) => (share === null ? "–" : `${Math.round(100 * share)} %`);
const rate = (tokens) => (tokens < 10 ? tokens.toFixed(1) : Math.round(tokens).toLocaleString());

function duration(seconds) {
  const minutes = Math.floor(seconds / 60);
  if (minutes < 1) return `${Math.floor(seconds)} s`;
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} days`;
}

/** A line through the latest values. */
class Sparkline {
  constructor() {
    this.values = [];
    this.line = document.createElementNS(SVG, "polyline");
    this.element = document.createElementNS(SVG, "svg");
    this.element.setAttribute("viewBox", "0 0 59 16");
    this.element.setAttribute("preserveAspectRatio", "none");
    this.element.setAttribute("class", "spark");
    this.element.setAttribute("aria-hidden", "true");
    this.element.append(this.line);
  }

  add(value) {
    this.values = [...this.values, value].slice(-REMEMBERED);
    const most = Math.max(1, ...this.values);
    const first = REMEMBERED - this.values.length;
    this.line.setAttribute("points", this.values.map((each, index) => `${first + index},${15 - (14 * each) / most}`).join(" "));
  }
}

class WorkerRow {
  constructor(address) {
    this.cells = COLUMNS.map((name, index) =>
      el(index ? "td" : "th", { role: index ? "cell" : "rowheader", "data-label": name }),
    );
    this.element = el("tr", { role: "row" }, ...this.cells);
    this.model = el("span", { className: "hint" });
    this.state = el("span", { className: "state" });
    this.problem = el("span", { className: "hint" });
    this.waiting = el("span");
    this.prefill = el("span", { className: "hint" });
    this.used = el("span");
    this.fill = el("span", { className: "fill" });
    this.room = el("span", { className: "hint" });
    this.rate = el("span");
    this.spark = new Sparkline();
    this.cells[0].append(el("span", { className: "address" }, address), this.model);
    this.cells[1].append(this.state, this.problem);
    this.cells[4].append(this.waiting, this.prefill);
    this.cells[5].append(this.used, el("span", { className: "meter", "aria-hidden": "true" }, this.fill), this.room);
    this.cells[7].append(this.rate, this.spark.element);
  }

  update(worker) {
    this.element.className = worker.state;
    const role = worker.role === "both" ? "" : `, ${worker.role} only`;
    const facts = [`context of ${worker.context_length.toLocaleString()} tokens${role}`, worker.weights && worker.weights !== "default" ? `weights ${worker.weights}` : ""];
    setText(this.model, [worker.model || "model not known yet", ...(worker.context_length ? facts : [])].filter(Boolean).join(", "));
    setText(this.state, worker.state);
    this.state.className = `state ${worker.state}`;
    setText(this.problem, worker.problem);
    setText(this.cells[2], worker.breaker.replace("_", " "));
    this.cells[2].className = worker.breaker === "closed" ? "" : "broken";
    setText(this.cells[3], String(worker.running));
    setText(this.waiting, String(worker.waiting));
    setText(this.prefill, worker.queued_tokens ? `${worker.queued_tokens.toLocaleString()} tokens to prefill` : "");
    setText(this.used, percent(worker.cache_used));
    const host = worker.host_used === null ? "" : `, ${percent(worker.host_used)} of the host's`;
    setText(this.room, worker.cache_tokens ? `of ${worker.cache_tokens.toLocaleString()} tokens${host}` : "");
    this.fill.style.width = `${100 * (worker.cache_used ?? 0)}%`;
    setText(this.cells[6], percent(worker.hit_rate));
    setText(this.rate, rate(worker.tokens_per_second));
    this.spark.add(worker.tokens_per_second);
  }
}

export class Fleet {
  constructor() {
    this.rows = new Map();
    this.states = new Map();
    this.tiles = new Map();
    this.body = el("tbody", { role: "rowgroup" });
    const heads = COLUMNS.map((name) => el("th", { role: "columnheader", scope: "col" }, name));
    this.table = el(
      "table",
      { role: "table", className: "sheet workers", "aria-label": "Workers" },
      el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, ...heads)),
      this.body,
    );
    this.history = new History();
    this.list = el("dl", { className: "tiles" });
    this.problem = el("p", { className: "error", hidden: true });
    this.models = el("ul", { className: "models" });
    this.loras = el("ul", { className: "models", "aria-label": "Adapters" });
    this.closed = el(
      "div",
      { className: "card" },
      el("p", {}, "This router shows its workers to operators only: ", el("code", {}, "sapwood top"), " at its admin port, or this page with ",
        el("code", {}, "--status-page on"), "."),
      this.models,
    );
  }

  /** Shows what the router said. */
  update({ models, router, loras }) {
    const shown = router ? [this.problem, this.list, this.table, this.loras, this.history.element] : [this.closed, this.loras];
    if (!shown[0].isConnected) byId("fleet").replaceChildren(...shown);
    this.loras.replaceChildren(...loras.map(({ name, model, workers, running }) =>
      el("li", {}, el("strong", {}, name), ` adapter of ${model}, loaded on ${workers} worker${workers === 1 ? "" : "s"}, ${running} running`)));
    if (!router) {
      this.models.replaceChildren(...models.map(({ id, workers, context_length: most }) =>
        el("li", {}, el("strong", {}, id), ` ${workers} worker${workers === 1 ? "" : "s"}${most ? `, context of ${most.toLocaleString()} tokens` : ""}`)));
      return;
    }
    this.problem.hidden = !router.problem;
    setText(this.problem, router.problem);
    this.tile("Running", router.running);
    this.tile("Queued", router.queued);
    this.tile("Tokens/s", rate(router.tokens_per_second));
    this.tile("Resumed", router.resumptions);
    this.tile("Policy", router.policy);
    this.tile("Up for", duration(router.uptime));
    this.announce(router.workers);
    const gone = new Set(this.rows.keys());
    for (const worker of router.workers) {
      gone.delete(worker.address);
      if (!this.rows.has(worker.address)) this.rows.set(worker.address, new WorkerRow(worker.address));
      const row = this.rows.get(worker.address);
      row.update(worker);
      if (!row.element.isConnected) this.body.append(row.element);
    }
    for (const address of gone) {
      this.rows.get(address).element.remove();
      this.rows.delete(address);
    }
  }

  tile(name, text) {
    if (!this.tiles.has(name)) {
      const shown = el("dd");
      this.tiles.set(name, shown);
      this.list.append(el("div", {}, el("dt", {}, name), shown));
    }
    setText(this.tiles.get(name), String(text));
  }

  /** Tells those who do not see the table what has become of a worker. */
  announce(workers) {
    const now = new Map(workers.map((worker) => [worker.address, worker.state]));
    const news = workers.filter(({ address, state }) => this.states.has(address) && this.states.get(address) !== state);
    if (news.length) setText(byId("fleet-news"), news.map(({ address, state }) => `Worker ${address} is ${state}.`).join(" "));
    this.states = now;
  }
}
