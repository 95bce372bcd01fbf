// Where a message would go, and why, worker by worker.

import { ApiError, post } from "./api.js";
import { byId, el, showError } from "./dom.js";
import { requestOf } from "./settings.js";

const COLUMNS = ["Worker", "", "Cached of the prompt", "Requests", "Tokens to prefill", "Cost"];

const REASONS = {
  cache_hit: "it holds the most of the prompt", cache_spill: "another holds more of the prompt, and is busier",
  cache_miss: "no worker is known to hold a whole page of the prompt", cache_handed: "it took over what a draining worker held",
};

/** A policy's reason in words. */
export const whyChosen = (reason) => REASONS[reason] ?? reason.replaceAll("_", " ");

function whyNot(candidate, chosen) {
  if (candidate.excluded) return candidate.excluded;
  if (candidate.cost === null || chosen.cost === null) return "could have been";
  if (candidate.cost > chosen.cost) return "would cost more";
  return candidate.cost === chosen.cost ? "would cost the same" : "passed over";
}

const amount = (value) => (value === null ? "–" : Number(value.toFixed(1)).toLocaleString());

function rowOf(candidate, found, chosen) {
  const here = candidate === chosen;
  const share = found.prompt_tokens ? Math.round((100 * candidate.cached_tokens) / found.prompt_tokens) : 0;
  const out = Boolean(candidate.excluded);
  const cells = [
    candidate.address,
    here ? `chosen: ${whyChosen(found.reason)}` : whyNot(candidate, chosen),
    out ? "–" : `${candidate.cached_tokens.toLocaleString()} (${share} %)`,
    candidate.requests.toLocaleString(),
    candidate.queued_tokens.toLocaleString(),
    out ? "–" : amount(candidate.cost),
  ];
  return el(
    "tr",
    { role: "row", className: here ? "chosen" : out ? "excluded" : "" },
    ...cells.map((text, index) =>
      el(index ? "td" : "th", { role: index ? "cell" : "rowheader", "data-label": COLUMNS[index] || "Why" }, text)),
  );
}

/** What each worker's cost is made of: the amounts, what one costs, and the sum, so that it can be checked. */
function costsOf(candidates, chosen, most) {
  const names = candidates[0].parts.map(({ name }) => name);
  const cell = ({ amount: many, unit, weight }) => {
    const each = weight === 1 ? "" : ` × ${Number(weight.toPrecision(3))}`;
    return [el("strong", {}, amount(many * weight)), el("span", { className: "hint" }, `${amount(many)} ${unit}${each}`)];
  };
  const labels = ["Worker", ...names.map((name) => name[0].toUpperCase() + name.slice(1)), "Cost, in tokens"];
  const lines = candidates.map((candidate) => {
    const bars = candidate.parts.map(({ amount: many, weight }, index) => {
      const bar = el("span", { className: `part part-${index}` });
      bar.style.width = `${Math.max(0, (100 * many * weight) / most)}%`;
      return bar;
    });
    const cells = [[candidate.address], ...candidate.parts.map(cell), [el("strong", {}, amount(candidate.cost)), el("span", { className: "parts", "aria-hidden": "true" }, ...bars)]];
    return el("tr", { role: "row", className: candidate === chosen ? "chosen" : "" }, ...cells.map((inside, index) =>
      el(index ? "td" : "th", { role: index ? "cell" : "rowheader", "data-label": labels[index] }, ...inside)));
  });
  const heads = labels.map((name, index) => el("th", { role: "columnheader", scope: "col" }, name, names[index - 1] ? el("span", { className: `swatch part-${index - 1}` }) : ""));
  return el("div", { className: "costs" }, el("h2", {}, "What the costs are made of"), el("p", { className: "hint" }, "The least cost wins, unless that worker has far more requests than the others."),
    el("table", { role: "table", className: "sheet sums", "aria-label": "Costs" }, el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, ...heads)), el("tbody", { role: "rowgroup" }, ...lines)));
}

function resultOf(found) {
  const chosen = found.candidates.find((candidate) => candidate.address === found.chosen);
  const rows = [chosen, ...found.candidates.filter((candidate) => candidate !== chosen)];
  const heads = COLUMNS.map((name) => el("th", { role: "columnheader", scope: "col" }, name || "Why"));
  const shadows = Object.entries(found.shadows).map(([name, choice]) =>
    el("li", {}, `${name} would choose ${choice.address} (${whyChosen(choice.reason)})`));
  const costs = rows.filter((candidate) => candidate.parts.length);
  const most = Math.max(1, ...costs.map(({ cost }) => cost));
  return [
    el("p", { className: "verdict" }, el("strong", {}, found.chosen), ` by ${found.policy}, for a prompt of ${found.prompt_tokens.toLocaleString()} tokens.`),
    el(
      "table",
      { role: "table", className: "sheet", "aria-label": "Workers and why" },
      el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, ...heads)),
      el("tbody", { role: "rowgroup" }, ...rows.map((candidate) => rowOf(candidate, found, chosen))),
    ),
    costs.length ? costsOf(costs, chosen, most) : "",
    shadows.length ? el("ul", { className: "hint" }, ...shadows) : "",
  ];
}

/** Lets the form ask. `chat` has the conversation; `onUnauthorised` as Chat's. */
export function explainRoutes(chat, onUnauthorised) {
  byId("route-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    const asked = [{ role: "user", content: byId("route-text").value }];
    try {
      const request = byId("route-after").checked
        ? requestOf([...chat.messages(), ...asked])
        : { model: byId("model").value || undefined, messages: asked };
      byId("route").replaceChildren(...resultOf(await post("route", request)));
      showError(byId("route-error"), null);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      byId("route").replaceChildren();
      showError(byId("route-error"), error);
      if (error.status === 401) onUnauthorised(error);
    }
  });
}
