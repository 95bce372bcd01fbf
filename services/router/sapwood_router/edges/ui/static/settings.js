// What a chat is asked with: the fields next to it, kept in the tab.

import { ApiError } from "./api.js";
import { byId, el, setText } from "./dom.js";

const STORE = "sapwood-settings";
const NUMBERS = ["temperature", "max_tokens", "seed"];
const SAMPLING = ["top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"];
const FIELDS = ["model", "other-model", "system", ...NUMBERS, ...SAMPLING, "stop-texts", "logprobs", "tool_choice", "tools", "schema"];
const ASKED_AS = { response_format: "schema", top_logprobs: "logprobs", stop: "stop-texts" }; // how the server calls a field that has another name here
const ALTERNATIVES = 5; // tokens that are shown instead of each

const value = (id) => byId(id).value.trim();

function number(id) {
  const text = value(id);
  const read = Number(text);
  if (text === "") return undefined;
  if (!Number.isFinite(read)) throw new ApiError(`${text} is not a number`, id);
  if (Number.isInteger(read) && !Number.isSafeInteger(read)) throw new ApiError(`${text} is more than a browser counts`, id);
  return read;
}

function json(id) {
  try {
    return value(id) === "" ? undefined : JSON.parse(value(id));
  } catch (error) {
    throw new ApiError(`this is not JSON: ${error.message}`, id);
  }
}

/** The models that are asked: one, or two side by side. */
export function modelsAsked() {
  const model = byId("model").value || undefined;
  return [model, ...(value("other-model") ? [value("other-model")] : [])];
}

/** The request for `model`'s answer to `messages`. Raises ApiError where a field cannot be read; whether it makes sense the server says. */
export function requestOf(messages, model = byId("model").value) {
  const schema = json("schema");
  const system = byId("system").value;
  const stops = byId("stop-texts").value.split("\n").filter(Boolean);
  return {
    model: model || undefined,
    messages: system.trim() ? [{ role: "system", content: system }, ...messages] : messages,
    ...Object.fromEntries([...NUMBERS, ...SAMPLING].map((name) => [name, number(name)])),
    stop: stops.length ? stops : undefined,
    ...(byId("logprobs").checked ? { logprobs: true, top_logprobs: ALTERNATIVES } : {}),
    tools: json("tools"),
    tool_choice: value("tool_choice") || undefined,
    response_format: schema && { type: "json_schema", json_schema: { name: "answer", schema } },
  };
}

/** Marks the field that an error names, if it is one of these; null marks none. */
export function markField(field) {
  const named = field?.split(/[.[]/)[0];
  for (const id of FIELDS) {
    const wrong = id === (ASKED_AS[named] ?? named);
    if (wrong) byId(id).setAttribute("aria-invalid", "true");
    else byId(id).removeAttribute("aria-invalid");
    if (wrong) for (let at = byId(id).closest("details"); at; at = at.parentElement.closest("details")) at.open = true;
  }
}

/** Offers the models there are; the one that is chosen stays, even while no worker has it. */
export function offerModels(models) {
  const select = byId("model");
  const chosen = select.value || select.dataset.kept || "";
  const names = models.map((model) => model.id);
  if (chosen && !names.includes(chosen)) names.unshift(chosen);
  byId("no-model").hidden = models.length > 0;
  if (names.join("\n") !== [...select.options].map((option) => option.value).join("\n")) {
    select.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
    select.value = chosen || names[0] || "";
  }
  const other = byId("other-model");
  const beside = other.value || other.dataset.kept || "";
  if ([...other.options].slice(1).map((option) => option.value).join("\n") !== names.join("\n")) {
    other.replaceChildren(el("option", { value: "" }, "none"), ...names.map((name) => el("option", { value: name }, name)));
    other.value = names.includes(beside) ? beside : "";
  }
  const hint = models.find((model) => model.id === select.value)?.hint ?? "";
  byId("model-hint").hidden = !hint;
  setText(byId("model-hint"), hint);
}

/** Takes up what the tab has kept, and keeps what is changed. */
export function keepSettings() {
  const kept = JSON.parse(sessionStorage.getItem(STORE) ?? "{}");
  for (const id of FIELDS) {
    if (byId(id).type === "checkbox") byId(id).checked = Boolean(kept[id]);
    else byId(id).value = kept[id] ?? "";
  }
  for (const id of ["model", "other-model"]) byId(id).dataset.kept = kept[id] ?? "";
  byId("settings").addEventListener("submit", (event) => event.preventDefault());
  byId("settings").addEventListener("input", () => {
    const now = Object.fromEntries(FIELDS.map((id) => [id, byId(id).type === "checkbox" ? byId(id).checked : byId(id).value]));
    sessionStorage.setItem(STORE, JSON.stringify(now));
  });
  byId("more").open = matchMedia("(min-width: 60rem)").matches;
}
