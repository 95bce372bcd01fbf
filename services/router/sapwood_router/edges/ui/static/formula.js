// Formulas: the part of TeX that models write, as MathML, which browsers draw by themselves. What is not known is shown as it is written.

const SPACE = "http://www.w3.org/1998/Math/MathML";
const MOST = 4000; // letters of a formula
const DEEPEST = 40;

const GREEK =
  "alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι kappa κ lambda λ mu μ nu ν xi ξ pi π rho ρ sigma σ " +
  "tau τ upsilon υ phi ϕ varphi φ chi χ psi ψ omega ω Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Phi Φ Psi Ψ Omega Ω hbar ℏ ell ℓ infty ∞ " +
  "partial ∂ nabla ∇ emptyset ∅ aleph ℵ Re ℜ Im ℑ";
const SIGNS =
  "times × cdot ⋅ div ÷ pm ± mp ∓ leq ≤ le ≤ geq ≥ ge ≥ neq ≠ ne ≠ approx ≈ equiv ≡ sim ∼ propto ∝ in ∈ notin ∉ subset ⊂ subseteq ⊆ supset ⊃ cup ∪ " +
  "cap ∩ forall ∀ exists ∃ neg ¬ land ∧ lor ∨ wedge ∧ vee ∨ to → rightarrow → leftarrow ← Rightarrow ⇒ Leftarrow ⇐ implies ⟹ iff ⟺ leftrightarrow ↔ " +
  "mapsto ↦ ldots … cdots ⋯ dots … vdots ⋮ ddots ⋱ circ ∘ star ⋆ oplus ⊕ otimes ⊗ perp ⊥ parallel ∥ mid ∣ angle ∠ ll ≪ gg ≫ setminus ∖ prime ′ " +
  "sum ∑ prod ∏ int ∫ iint ∬ oint ∮ bigcup ⋃ bigcap ⋂ langle ⟨ rangle ⟩ lfloor ⌊ rfloor ⌋ lceil ⌈ rceil ⌉ lbrace { rbrace } vert | Vert ‖ uparrow ↑ " +
  "downarrow ↓ therefore ∴ because ∵ cong ≅ bullet ∙ ast ∗";
const pairs = (text) => new Map(text.split(" ").flatMap((each, index, list) => (index % 2 ? [] : [[each, list[index + 1]]])));
const LETTERS = pairs(GREEK);
const OPERATORS = pairs(SIGNS);
const WIDE = new Set(["sum", "prod", "int", "iint", "oint", "bigcup", "bigcap"]);
const NAMES = new Set("sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan log ln lg exp max min sup inf lim det dim gcd deg arg ker Pr mod argmax argmin".split(" "));
const BELOW = new Set(["lim", "max", "min", "sup", "inf", "argmax", "argmin", "sum", "prod", "bigcup", "bigcap"]);
const ACCENTS = pairs("hat ^ widehat ^ bar ¯ overline ¯ vec → tilde ~ widetilde ~ dot ˙ ddot ¨");
const STYLES = { mathbf: "bold", boldsymbol: "bold", bm: "bold", mathbb: "double-struck", mathcal: "script", mathrm: "normal", mathsf: "normal", mathit: "", mathfrak: "fraktur" };
const GAPS = { ",": ".17em", ":": ".22em", ";": ".28em", " ": ".28em", "!": "0", quad: "1em", qquad: "2em" };
const FENCES = { matrix: ["", ""], pmatrix: ["(", ")"], bmatrix: ["[", "]"], vmatrix: ["|", "|"], cases: ["{", ""], aligned: ["", ""], align: ["", ""], "align*": ["", ""], array: ["", ""], gathered: ["", ""] };
const DOUBLE = { C: "ℂ", H: "ℍ", N: "ℕ", P: "ℙ", Q: "ℚ", R: "ℝ", Z: "ℤ" };

function made(name, settings, ...children) {
  const element = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(settings)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}
const row = (children) => (children.length === 1 ? children[0] : made("mrow", {}, ...children));

class Reader {
  constructor(text) {
    this.tokens = text.match(/\\[A-Za-z]+\*?|\\[^]|[0-9]+(?:[.,][0-9]+)*|\s+|[^]/gu) ?? [];
    this.at = 0;
    this.depth = 0;
  }

  peek() {
    while (/^\s+$/.test(this.tokens[this.at] ?? "")) this.at++;
    return this.tokens[this.at];
  }

  take() {
    const token = this.peek();
    if (token === undefined) throw new SyntaxError("the formula ends too soon");
    this.at++;
    return token;
  }

  /** A row until one of the tokens, which is left. */
  row(...ends) {
    if (++this.depth > DEEPEST) throw new SyntaxError("too deep");
    const found = [];
    while (this.peek() !== undefined && !ends.includes(this.peek())) found.push(this.scripted());
    this.depth--;
    return row(found);
  }

  /** What stands in braces, or one thing. */
  argument() {
    if (this.peek() !== "{") {
      if (++this.depth > DEEPEST) throw new SyntaxError("too deep");
      const only = this.one();
      this.depth--;
      return only;
    }
    this.at++;
    const inside = this.row("}");
    this.take();
    return inside;
  }

  /** The letters in braces, as they are. */
  letters() {
    if (this.take() !== "{") return this.tokens[this.at - 1];
    let text = "";
    while (this.tokens[this.at] !== "}") {
      if (this.at >= this.tokens.length) throw new SyntaxError("a brace is open");
      text += this.tokens[this.at++];
    }
    this.at++;
    return text;
  }

  scripted() {
    const name = this.peek();
    const base = this.one();
    let [below, above] = [null, null];
    for (;;) {
      const next = this.peek();
      if (next === "_" && !below) this.at++, (below = this.argument());
      else if (next === "^" && !above) this.at++, (above = this.argument());
      else if (next === "'" && !above) {
        let marks = "";
        while (this.peek() === "'") this.at++, (marks += "′");
        above = made("mo", {}, marks);
      } else break;
    }
    if (!below && !above) return base;
    const limits = BELOW.has(name?.slice(1));
    if (below && above) return made(limits ? "munderover" : "msubsup", {}, base, below, above);
    return below ? made(limits ? "munder" : "msub", {}, base, below) : made(limits ? "mover" : "msup", {}, base, above);
  }

  one() {
    const token = this.take();
    if (token === "{") {
      this.at--;
      return this.argument();
    }
    if (token.startsWith("\\") && token.length > 1) return this.command(token.slice(1));
    if (/^[0-9]/.test(token)) return made("mn", {}, token);
    if (/^\p{L}$/u.test(token)) return made("mi", {}, token);
    if (token === "~") return made("mspace", { width: ".33em" });
    if (token === "&" || token === "}") throw new SyntaxError(`${token} has no place here`);
    return made("mo", /^[()[\]|]$/.test(token) ? { stretchy: "false" } : {}, token === "-" ? "−" : token === "*" ? "∗" : token);
  }

  command(name) {
    if (LETTERS.has(name)) return made("mi", {}, LETTERS.get(name));
    if (OPERATORS.has(name)) return made("mo", WIDE.has(name) ? { largeop: "true" } : {}, OPERATORS.get(name));
    if (NAMES.has(name)) return made("mi", { mathvariant: "normal" }, name);
    if (Object.hasOwn(GAPS, name)) return made("mspace", { width: GAPS[name] });
    if (ACCENTS.has(name)) return made("mover", { accent: "true" }, this.argument(), made("mo", {}, ACCENTS.get(name)));
    if (Object.hasOwn(STYLES, name)) return this.styled(name);
    if (/^[{}%$&#_|]$/.test(name)) return made("mo", { stretchy: "false" }, name === "|" ? "‖" : name);
    switch (name) {
      case "frac": case "dfrac": case "tfrac": case "cfrac": {
        const above = this.argument();
        return made("mfrac", {}, above, this.argument());
      }
      case "binom": {
        const above = this.argument();
        return row([made("mo", {}, "("), made("mfrac", { linethickness: "0" }, above, this.argument()), made("mo", {}, ")")]);
      }
      case "sqrt": {
        if (this.peek() !== "[") return made("msqrt", {}, this.argument());
        this.at++;
        const degree = this.row("]");
        this.take();
        return made("mroot", {}, this.argument(), degree);
      }
      case "text": case "textbf": case "textit": case "textrm": case "mbox": return made("mtext", {}, this.letters());
      case "operatorname": case "operatorname*": return made("mi", { mathvariant: "normal" }, this.letters());
      case "boxed": return made("mrow", { class: "boxed" }, this.argument());
      case "underbrace": return made("munder", {}, this.argument(), made("mo", {}, "⏟"));
      case "overbrace": return made("mover", {}, this.argument(), made("mo", {}, "⏞"));
      case "left": return this.fenced();
      case "begin": return this.table(this.letters());
      case "displaystyle": case "textstyle": case "limits": case "nolimits": case "big": case "Big": case "bigg": case "Bigg": case "bigl":
      case "bigr": case "Bigl": case "Bigr": case "nonumber": return made("mrow", {});
      case "\\": return made("mspace", { linebreak: "newline" });
      default: throw new SyntaxError(`\\${name} is not known`);
    }
  }

  styled(name) {
    const inside = this.argument();
    const only = inside.textContent;
    if (name === "mathbb" && Object.hasOwn(DOUBLE, only)) return made("mi", { mathvariant: "normal" }, DOUBLE[only]);
    if (name === "mathrm" || name === "mathsf") return made("mi", { mathvariant: "normal" }, only);
    return made("mrow", { class: STYLES[name] === "bold" ? "bold" : "" }, inside);
  }

  fence() {
    const token = this.take();
    if (token === ".") return "";
    return token.startsWith("\\") ? (OPERATORS.get(token.slice(1)) ?? (token === "\\|" ? "‖" : token.slice(1))) : token;
  }

  fenced() {
    const open = this.fence();
    const inside = this.row("\\right");
    this.take();
    return made("mrow", {}, made("mo", { fence: "true", stretchy: "true" }, open), inside, made("mo", { fence: "true", stretchy: "true" }, this.fence()));
  }

  table(name) {
    if (!Object.hasOwn(FENCES, name)) throw new SyntaxError(`${name} is not known`);
    if (name === "array" && this.peek() === "{") this.letters();
    const rows = [[]];
    for (;;) {
      rows.at(-1).push(made("mtd", {}, this.row("&", "\\\\", "\\end")));
      const next = this.take();
      if (next === "\\\\") rows.push([]);
      else if (next === "\\end") break;
    }
    this.letters();
    if (rows.at(-1).length === 1 && !rows.at(-1)[0].textContent) rows.pop();
    const kind = name.startsWith("align") ? "aligned" : name === "cases" ? "cases" : "";
    const inside = made("mtable", { class: kind }, ...rows.map((cells) => made("mtr", {}, ...cells)));
    const [open, close] = FENCES[name];
    return made("mrow", {}, ...(open ? [made("mo", { fence: "true", stretchy: "true" }, open)] : []), inside, ...(close ? [made("mo", { fence: "true", stretchy: "true" }, close)] : []));
  }
}

/** The element of a formula, or null if it is none that is known: then it is shown as it was written. */
export function formula(text, block) {
  if (text.length > MOST) return null;
  try {
    const reader = new Reader(text);
    const inside = reader.row();
    if (reader.peek() !== undefined) return null;
    return made("math", block ? { display: "block", title: text } : { title: text }, inside);
  } catch (error) {
    if (error instanceof SyntaxError) return null;
    throw error;
  }
}
