// The last hour of the fleet: a chart for each measure, a line for each worker and one for all, and what happened on the time axis.

import { get } from "./api.js";
import { el } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const HOUR = 3600; // seconds
const [WIDTH, HEIGHT, LEFT, BOTTOM, TOP] = [360, 120, 44, 16, 8];
const COLOURS = 8;
const percent = (value) => `${Math.round(100 * value)} %`;
const plain = (value) => (value >= 100 || Number.isInteger(value) ? Math.round(value).toLocaleString() : value.toPrecision(2));
const CHARTS = [
  { title: "First token, ms", columns: ["first_token_ms"] },
  { title: "A token, ms", columns: ["token_ms"] },
  { title: "Waiting", columns: ["waiting"], whole: true },
  { title: "Running", columns: ["running"], whole: true },
  { title: "Tokens a second", columns: ["tokens_per_second"] },
  { title: "Prompt tokens cached", columns: ["hit_rate"], share: true },
  { title: "Device's cache in use", columns: ["cache_used"], share: true },
  { title: "Host's cache in use", columns: ["host_used"], share: true },
];
const TIERS = { title: "Cached tokens found a second, by tier", columns: ["device_hits_per_second", "host_hits_per_second", "storage_hits_per_second"], names: ["device", "host", "store"] };
const SAID = { up: "is up", down: "is down", draining: "drains", removed: "was removed", weights: "has the weights" };

const drawn = (name, settings, ...children) => {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(settings)) made.setAttribute(key, value);
  made.append(...children);
  return made;
};

/** Above a value: 1, 2 or 5 times a power of ten. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((each) => each * power >= value);
}

const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
const sentence = ({ kind, worker, text }) => (kind === "resumed" ? text : `${worker} ${SAID[kind] ?? kind}${text ? `${kind === "weights" ? " " : ": "}${text}` : ""}`);

export class History {
  constructor() {
    this.next = 0;
    this.samples = [];
    this.events = [];
    this.charts = el("div", { className: "charts" });
    this.legend = el("p", { className: "legend" });
    this.list = el("ol", { className: "events", "aria-label": "What happened" });
    this.asked = 0;
    this.element = el("section", { "aria-label": "The last hour" }, el("h2", {}, "The last hour"), this.legend, this.charts,
      el("h3", {}, "What happened"), this.list);
  }

  /** Asks for what is new, once in `seconds` of a sample. */
  async look() {
    if (performance.now() - this.asked < 2000) return;
    this.asked = performance.now();
    const told = await get(`history?after=${this.next}`);
    if (told.next < this.next) [this.samples, this.events] = [[], []]; // the router began again
    this.next = told.next;
    this.columns = told.columns;
    if (!told.samples.length && !told.events.length && this.shown) return;
    this.shown = true;
    const since = Date.now() / 1000 - HOUR;
    this.samples = [...this.samples, ...told.samples].filter(({ at }) => at > since);
    this.events = [...this.events, ...told.events].filter(({ at }) => at > since);
    this.show();
  }

  show() {
    const end = this.samples.at(-1)?.at ?? Date.now() / 1000;
    const workers = [...new Set(this.samples.flatMap((sample) => Object.keys(sample.workers)))].sort();
    this.legend.replaceChildren(
      el("span", { className: "key together" }, "all together"),
      ...workers.map((worker, index) => el("span", { className: `key line-${index % COLOURS}` }, worker)),
    );
    const first = this.samples[0]?.at ?? end;
    const span = Math.min(HOUR, Math.max(300, end - first));
    this.charts.replaceChildren(...[...CHARTS, TIERS].map((chart) => this.chart(chart, workers, end - span, span)).filter(Boolean));
    this.list.replaceChildren(...this.events.toReversed().slice(0, 50).map((event) =>
      el("li", { className: `event ${event.kind}` }, el("time", {}, new Date(event.at * 1000).toLocaleTimeString()), ` ${sentence(event)}`)));
    if (!this.events.length) this.list.replaceChildren(el("li", { className: "hint" }, "Nothing yet: workers that come, go or drain, resumed streams and new weights are shown here."));
  }

  chart({ title, columns, names, share, whole }, workers, start, span) {
    const at = columns.map((name) => this.columns.indexOf(name));
    const lines = names
      ? names.map((name, index) => ({ name, className: `line line-${index}`, values: this.samples.map(({ together }) => together[at[index]]) }))
      : [
          ...workers.map((name, index) => ({ name, className: `line line-${index % COLOURS}`, values: this.samples.map((sample) => sample.workers[name]?.[at[0]] ?? null) })),
          ...(workers.length > 1 ? [{ name: "all together", className: "line together", values: this.samples.map(({ together }) => together[at[0]]) }] : []),
        ];
    const values = lines.flatMap((line) => line.values).filter((value) => value !== null);
    if (!values.length && columns[0] === "host_used") return null; // there is no such tier
    const most = share ? 1 : roundUp(Math.max(whole ? 2 : 0, ...values) || 1);
    const say = share ? percent : plain;
    const x = (moment) => LEFT + ((WIDTH - LEFT - 4) * (moment - start)) / span;
    const y = (value) => HEIGHT - BOTTOM - ((HEIGHT - BOTTOM - TOP) * value) / most;
    const paths = lines.map((line) => {
      let open = false;
      const path = line.values.map((value, index) => {
        if (value === null) return (open = false), "";
        const step = `${open ? "L" : "M"}${x(this.samples[index].at).toFixed(1)} ${y(value).toFixed(1)}`;
        const alone = !open && (line.values[index + 1] ?? null) === null;
        open = true;
        return alone ? `${step}h.01` : step;
      });
      return drawn("path", { class: line.className, d: path.join("") });
    });
    const ticks = this.events.filter((event) => event.at >= start).map((event) =>
      drawn("line", { class: `tick ${event.kind}`, x1: x(event.at), x2: x(event.at), y1: TOP, y2: HEIGHT - BOTTOM }, drawn("title", {}, `${clock(event.at)} ${sentence(event)}`)));
    const label = (text, place, anchor) => drawn("text", { x: place[0], y: place[1], "text-anchor": anchor }, text);
    const last = lines.at(-1)?.values.findLast((value) => value !== null);
    const now = lines.map((line) => [line.name, line.values.findLast((value) => value !== null)]).filter(([, value]) => value !== undefined);
    const picture = drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}: ${now.map(([name, value]) => `${name} ${say(value)}`).join(", ") || "no data yet"}` },
      drawn("line", { class: "axis", x1: LEFT, x2: WIDTH - 4, y1: y(0), y2: y(0) }), drawn("line", { class: "grid", x1: LEFT, x2: WIDTH - 4, y1: y(most), y2: y(most) }),
      label(say(most), [LEFT - 6, y(most) + 4], "end"), label(say(0), [LEFT - 6, y(0) + 4], "end"),
      label(clock(start), [LEFT, HEIGHT - 3], "start"), label(clock(start + span), [WIDTH - 4, HEIGHT - 3], "end"), ...ticks, ...paths);
    const keys = names ? el("span", { className: "legend" }, ...names.map((name, index) => el("span", { className: `key line-${index}` }, name))) : null;
    return el("figure", {}, el("figcaption", {}, title, el("strong", {}, !names && last !== undefined ? say(last) : "")), picture, keys);
  }
}
