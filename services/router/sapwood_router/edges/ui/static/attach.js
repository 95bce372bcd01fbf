// Files and pictures that go with the next message: dropped, pasted or chosen.

import { button, byId, el, showError } from "./dom.js";

const MOST_TEXT = 512 * 1024; // bytes of a text file
const MOST_PICTURE = 8 * 1024 * 1024; // bytes of a picture
const MOST = 16; // files of a message

const read = (file, how) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read`));
    reader[how](file);
  });

/** A file as a turn keeps it: `{name, text}` or `{name, url}`. Raises Error where it is neither text nor a picture. */
async function take(file) {
  const name = file.name || "pasted";
  const size = (bytes) => `${(bytes / 1024 / 1024).toFixed(1)} MB`;
  if (file.type.startsWith("image/") && file.type !== "image/svg+xml") {
    if (file.size > MOST_PICTURE) throw new Error(`${name} has ${size(file.size)}; a picture may have ${size(MOST_PICTURE)}`);
    return { name, url: await read(file, "readAsDataURL") };
  }
  if (file.size > MOST_TEXT) throw new Error(`${name} has ${size(file.size)}; a text file may have ${size(MOST_TEXT)}`);
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await read(file, "readAsArrayBuffer"));
    if (!text.includes("\u0000")) return { name, text };
  } catch (error) {
    if (!(error instanceof TypeError)) throw error;
  }
  throw new Error(`${name} is neither a text in UTF-8 nor a picture`);
}

/** What a turn brought along, for its element. */
export function shownFiles({ files = [], pictures = [] }, remove = null) {
  const off = (each) => (remove ? button("×", () => remove(each), { className: "quiet", "aria-label": `Remove ${each.name}` }) : "");
  return [
    ...pictures.map((each) => el("figure", { className: "picture" }, el("img", { src: each.url, alt: each.name, title: each.name }), off(each))),
    ...files.map((each) =>
      el("details", { className: "file" }, el("summary", {}, each.name, el("span", { className: "hint" }, ` ${each.text.length.toLocaleString()} letters `), off(each)),
        el("pre", { tabIndex: 0 }, each.text.slice(0, 20_000)))),
  ];
}

export class Attachments {
  constructor() {
    this.clear();
    const input = byId("file");
    byId("attach").addEventListener("click", () => input.click());
    input.addEventListener("change", () => {
      this.add([...input.files]);
      input.value = "";
    });
    const talk = byId("talk");
    const carries = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
    for (const name of ["dragenter", "dragover"]) {
      talk.addEventListener(name, (event) => {
        if (!carries(event)) return;
        event.preventDefault();
        talk.classList.add("dropping");
      });
    }
    talk.addEventListener("dragleave", (event) => talk.contains(event.relatedTarget) || talk.classList.remove("dropping"));
    talk.addEventListener("drop", (event) => {
      if (!carries(event)) return;
      event.preventDefault();
      talk.classList.remove("dropping");
      this.add([...event.dataTransfer.files]);
    });
    byId("text").addEventListener("paste", (event) => {
      const files = [...(event.clipboardData?.files ?? [])];
      if (!files.length) return;
      event.preventDefault();
      this.add(files);
    });
  }

  async add(files) {
    showError(byId("attach-error"), null);
    for (const file of files) {
      try {
        if (this.files.length + this.pictures.length >= MOST) throw new Error(`a message takes ${MOST} files`);
        const taken = await take(file);
        (taken.url ? this.pictures : this.files).push(taken);
      } catch (error) {
        showError(byId("attach-error"), error);
      }
    }
    this.show();
  }

  get any() {
    return this.files.length + this.pictures.length > 0;
  }

  /** What is attached, which is no longer. */
  taken() {
    const { files, pictures } = this;
    this.clear();
    return { ...(files.length ? { files } : {}), ...(pictures.length ? { pictures } : {}) };
  }

  clear() {
    this.files = [];
    this.pictures = [];
    showError(byId("attach-error"), null);
    this.show();
  }

  show() {
    const remove = (gone) => {
      this.files = this.files.filter((each) => each !== gone);
      this.pictures = this.pictures.filter((each) => each !== gone);
      this.show();
      byId("text").focus();
    };
    byId("attached").replaceChildren(...shownFiles(this, remove));
    byId("attached").hidden = !this.any;
  }
}
