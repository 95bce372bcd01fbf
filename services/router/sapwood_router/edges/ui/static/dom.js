// Elements. Text is only ever text: nothing here takes markup, and the page's policy lets no script make any of a string.

/** The element of that id. */
export const byId = (id) => document.getElementById(id);

/** Makes an element. Names with a hyphen, and `role`, are attributes, others properties; null among the children is left out. */
export function el(name, settings = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(settings)) {
    if (key.includes("-") || key === "role") made.setAttribute(key, value);
    else made[key] = value;
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

/** A button that does something when pressed. */
export const button = (text, press, settings = {}) =>
  el("button", { type: "button", onclick: press, ...settings }, text);

/** Sets a text, unless it is that already: a selection in it stays. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Shows an error as the server told it: its message, the field at fault and the status; null hides it. */
export function showError(element, error) {
  element.hidden = error === null;
  element.replaceChildren(...(error === null ? [] : errorParts(error)));
}

/** The parts of an error's text. */
export function errorParts(error) {
  const about = [error.field, error.status ? `HTTP ${error.status}` : null].filter(Boolean);
  return [error.message, about.length ? el("span", { className: "about" }, about.join(" · ")) : ""];
}

/** Copies a text. Browsers have their clipboard only where the page came over TLS or from this machine. */
export async function copy(text, pressed) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = el("textarea", { value: text, className: "unseen" });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    pressed.focus();
  }
  const before = pressed.textContent;
  if (before !== "Copied") {
    pressed.textContent = "Copied";
    setTimeout(() => (pressed.textContent = before), 1200);
  }
}
