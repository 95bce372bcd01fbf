// The router's HTTP API. The key is in this tab's storage and nowhere else.

const KEY = "sapwood-key";

export const getKey = () => sessionStorage.getItem(KEY);
export const setKey = (key) => sessionStorage.setItem(KEY, key);
export const forgetKey = () => sessionStorage.removeItem(KEY);

/** An error of the router's, or on the way to it. */
export class ApiError extends Error {
  constructor(message, field = null, status = 0) {
    super(message);
    this.field = field;
    this.status = status;
  }
}

/** Sends a request, a POST if there is a body; returns the response. Raises ApiError, and AbortError once `signal` says so. */
async function ask(path, body, signal) {
  const headers = {};
  if (getKey()) headers.authorization = `Bearer ${getKey()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const method = body === undefined ? "GET" : "POST";
  let response;
  try {
    response = await fetch(path, { method, headers, body: JSON.stringify(body), signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("the router does not answer");
  }
  if (response.ok) return response;
  const { error } = await response.json().catch(() => ({}));
  throw new ApiError(error?.message ?? response.statusText, error?.param, response.status);
}

/** Gets JSON. */
export const get = async (path) => (await ask(path)).json();

/** Posts JSON and gets JSON. */
export const post = async (path, body) => (await ask(path, body)).json();

/** Posts JSON; the events of the answer, as they come. */
export async function* stream(path, body, signal) {
  const response = await ask(path, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      return { done: true };
    });
    if (done) throw new ApiError("the answer broke off: the router was lost");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.message, event.error.param);
      yield event;
    }
  }
}
