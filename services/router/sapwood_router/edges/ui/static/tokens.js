// An answer's tokens, coloured by how likely the model held each; what it held likely instead is shown on hover, or by the arrow keys.

import { byId, el } from "./dom.js";

const MOST = 8000; // tokens that are kept of a turn

/** Adds the tokens of an event's choice to its turn. */
export function takeTokens(turn, choice) {
  const content = choice.logprobs?.content;
  if (!content) return;
  turn.tokens ??= [];
  for (const { token, logprob, top_logprobs: top = [] } of content.slice(0, MOST - turn.tokens.length)) {
    turn.tokens.push([token, logprob, top.map((each) => [each.token, each.logprob])]);
  }
}

const share = (logprob) => {
  const percent = 100 * Math.exp(logprob);
  return percent >= 99.95 ? "100 %" : percent >= 0.1 ? `${percent.toFixed(1)} %` : "< 0.1 %";
};
const visible = (token) => token.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "(no letter yet)";
const level = (logprob) => Math.min(4, Math.floor(-logprob / 0.7)); // 0: above half; 4: below one in sixteen

function showTip(at, [token, logprob, top]) {
  const tip = byId("token-tip");
  const likely = top.some(([text]) => text === token) ? top : [...top, [token, logprob]];
  const lines = likely.map(([text, value]) => {
    const bar = el("span", { className: "bar-fill" });
    bar.style.width = `${100 * Math.exp(value)}%`;
    return el("tr", { className: text === token ? "chosen" : "" }, el("th", {}, visible(text)), el("td", {}, share(value)), el("td", { className: "bar-cell" }, bar));
  });
  tip.replaceChildren(el("table", {}, el("tbody", {}, ...lines)));
  tip.hidden = false;
  const { left, bottom, top: above } = at.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(left, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${bottom + tip.offsetHeight + 12 > innerHeight ? above - tip.offsetHeight - 6 : bottom + 6}px`;
}

export const hideTip = () => (byId("token-tip").hidden = true);

/** The element of a turn's tokens. */
export function tokensOf(tokens) {
  const spans = tokens.map(([token, logprob]) => el("span", { className: `token level-${level(logprob)}` }, token));
  const box = el("div", { className: "tokens", tabIndex: 0, role: "group", "aria-label": "Tokens; the arrow keys go through them" }, ...spans);
  let at = -1;
  const show = (index) => {
    spans[at]?.classList.remove("here");
    at = index;
    spans[at].classList.add("here");
    showTip(spans[at], tokens[at]);
  };
  box.addEventListener("pointerover", (event) => {
    const index = spans.indexOf(event.target);
    if (index >= 0) show(index);
  });
  box.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    show(Math.max(0, Math.min(spans.length - 1, at + step)));
  });
  for (const name of ["pointerleave", "blur"]) {
    box.addEventListener(name, () => {
      spans[at]?.classList.remove("here");
      hideTip();
    });
  }
  return box;
}
