// The radix tree of the latest prompts: from left to right a prompt's pages, below each other what begins alike and then differs.

import { ApiError, get } from "./api.js";
import { byId, el, showError } from "./dom.js";

const SHOWN = 200; // rows
const TIERS = { gpu: "device", host: "host", remote: "store", believed: "believed: the worker publishes no events" };

function columnsOf(tree) {
  const starts = [];
  for (const node of tree) starts.push(node.parent < 0 ? 0 : starts[node.parent] + tree[node.parent].pages);
  return starts;
}

/** Each node's row: the first child continues its parent's, others get one of their own. */
function rowsOf(tree) {
  const rows = [];
  const begun = new Set();
  let next = 0;
  tree.forEach(({ parent }, index) => {
    if (parent >= 0 && !begun.has(parent)) rows[index] = rows[parent];
    else rows[index] = next++;
    begun.add(parent);
  });
  return rows;
}

export class CacheView {
  constructor() {
    this.asked = 0;
  }

  async look() {
    if (performance.now() - this.asked < 2000) return;
    this.asked = performance.now();
    try {
      this.show(await get("cache"));
      showError(byId("cache-error"), null);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      byId("cache").replaceChildren();
      showError(byId("cache-error"), error);
    }
  }

  show({ page_size: size, workers, tree }) {
    const names = workers.map(({ worker }) => worker);
    const tokens = (pages) => `${(pages * size).toLocaleString()} tokens`;
    const totals = workers.map((each, index) =>
      el("li", {}, el("span", { className: `dot dot-${index % 8}` }), el("strong", { className: "address" }, each.worker),
        each.known ? ` ${tokens(each.device)} on the device${each.host ? `, ${tokens(each.host)} in the host's memory` : ""}${each.storage ? `, ${tokens(each.storage)} in the store` : ""}`
          : " publishes no KV events: the router knows only what it sent there"));
    const most = Math.max(1, ...tree.map(({ heat }) => heat));
    const [starts, rows] = [columnsOf(tree), rowsOf(tree)];
    const end = Math.max(1, ...tree.map((node, index) => starts[index] + node.pages));
    const picture = el("div", { className: "tree", role: "list", "aria-label": "Cached prefixes" });
    picture.style.gridTemplateColumns = `repeat(${end}, minmax(${end > 60 ? 6 : 14}px, 1fr))`;
    tree.forEach((node, index) => {
      if (rows[index] >= SHOWN) return;
      const held = node.held.map(([worker, tier]) => `${worker} (${TIERS[tier] ?? tier})`);
      const text = `${tokens(node.pages)} after ${tokens(starts[index])}; in ${node.heat} of the latest prompts; ${held.length ? `held by ${held.join(", ")}` : "held by no worker any more"}`;
      const dots = node.held.map(([worker, tier]) => el("span", { className: `dot dot-${Math.max(0, names.indexOf(worker)) % 8} ${tier}` }));
      const box = el("div", { className: `node ${node.held.length ? "" : "gone"}`, role: "listitem", tabIndex: 0, title: text, "aria-label": text }, ...dots,
        el("span", { className: "size" }, String(node.pages * size)));
      box.style.gridColumn = `${starts[index] + 1} / span ${node.pages}`;
      box.style.gridRow = String(rows[index] + 1);
      box.style.setProperty("--heat", `${Math.round(12 + (76 * Math.log1p(node.heat)) / Math.log1p(most))}%`);
      picture.append(box);
    });
    const said = tree.length ? `A box is a run of tokens, its number how many; the warmer, the more of the latest prompts have it. The dots are the workers that hold it.`
      : "No prompt has a whole page yet. Ask something longer, and look again.";
    const focused = document.activeElement?.getAttribute("aria-label");
    const scrolled = byId("cache").querySelector(".tree-box")?.scrollLeft ?? 0;
    byId("cache").replaceChildren(el("ul", { className: "totals" }, ...totals), el("p", { className: "hint" }, said), el("div", { className: "tree-box" }, picture));
    byId("cache").querySelector(".tree-box").scrollLeft = scrolled;
    if (focused) [...picture.children].find((box) => box.getAttribute("aria-label") === focused)?.focus();
  }
}
