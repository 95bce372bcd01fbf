// The list of conversations: open, export, remove.

import { button, byId, el } from "./dom.js";
import { all, remove } from "./store.js";

/** Lets the browser save a JSON file. */
function save(name, value) {
  const url = URL.createObjectURL(new Blob([JSON.stringify(value, null, 2)], { type: "application/json" }));
  const link = el("a", { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

export class ConversationList {
  /** `actions`: `open(kept)` and `removed(id)`. */
  constructor(actions) {
    this.actions = actions;
    byId("export").addEventListener("click", async () => save("sapwood-conversations.json", { conversations: (await all()).map(({ owner, ...each }) => each) }));
    byId("past").open = matchMedia("(min-width: 75.01rem)").matches;
  }

  show(kept, now) {
    byId("export").hidden = kept.length === 0;
    byId("conversations").replaceChildren(...kept.map((each) => this.item(each)));
    this.mark(now);
  }

  item({ owner, ...conversation }) {
    const { id, title } = conversation;
    const gone = async (event) => {
      const item = event.currentTarget.closest("li");
      await remove(id);
      const next = item.nextElementSibling ?? item.previousElementSibling;
      item.remove();
      (next?.querySelector("button") ?? byId("clear")).focus();
      byId("export").hidden = !byId("conversations").childElementCount;
      this.actions.removed(id);
    };
    return el("li", { "data-id": id },
      button(title, () => this.actions.open(conversation), { className: "quiet title", title }),
      button("⤓", () => save(`sapwood-${id}.json`, conversation), { className: "quiet", "aria-label": `Export ${title}`, title: "Export as JSON" }),
      button("×", gone, { className: "quiet", "aria-label": `Remove ${title}`, title: "Remove" }));
  }

  mark(id) {
    for (const item of byId("conversations").children) {
      const shown = item.dataset.id === id;
      item.classList.toggle("chosen", shown);
      if (shown) item.firstElementChild.setAttribute("aria-current", "true");
      else item.firstElementChild.removeAttribute("aria-current");
    }
  }
}
