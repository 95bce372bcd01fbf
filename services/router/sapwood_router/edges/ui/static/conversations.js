// The list of conversations: open, export, import, remove.

import { button, byId, el, setText, showError } from "./dom.js";
import { fingerprint, readConversations } from "./import.js";
import { MOST, all, keep, remove } from "./store.js";

/** Lets the browser save a JSON file. */
function save(name, value) {
  const url = URL.createObjectURL(new Blob([JSON.stringify(value, null, 2)], { type: "application/json" }));
  const link = el("a", { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

export class ConversationList {
  /** `actions`: `open(kept)`, `removed(id)` and `imported()`. */
  constructor(actions) {
    this.actions = actions;
    byId("export").addEventListener("click", async () => save("sapwood-conversations.json", { conversations: (await all()).map(({ owner, ...each }) => each) }));
    byId("import").addEventListener("click", () => byId("import-file").click());
    byId("import-file").addEventListener("change", async (event) => {
      const files = [...event.target.files];
      event.target.value = "";
      await this.take(files);
    });
    byId("past").open = matchMedia("(min-width: 75.01rem)").matches;
  }

  show(kept, now) {
    byId("export").hidden = kept.length === 0;
    byId("conversations").replaceChildren(...kept.map((each) => this.item(each)));
    this.mark(now);
  }

  /** Adds the conversations of files: of all of them, or of none where one is no such file. */
  async take(files) {
    showError(byId("import-error"), null);
    setText(byId("imported"), "");
    try {
      const read = (await Promise.all(files.map(readConversations))).flat().filter(({ turns }) => turns.length);
      const here = await all();
      const known = new Set(here.map(fingerprint));
      const others = read.filter((each) => !known.has(fingerprint(each)));
      if (here.length + others.length > MOST) throw new Error(`a browser keeps ${MOST} conversations; here are ${here.length}, and the files have ${others.length} others`);
      for (const conversation of others.reverse()) {
        if (!(await keep(conversation.toJSON()))) throw new Error("this browser keeps no conversations, or has no room for more");
      }
      const alike = read.length - others.length;
      setText(byId("imported"), [`${others.length} imported`, alike ? `${alike} were here already` : ""].filter(Boolean).join(", "));
    } catch (error) {
      showError(byId("import-error"), error);
    }
    this.actions.imported();
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
