// One answer as it comes: its tokens by maker, and how fast it was.

import { element } from "./dom.js";

const WORDS = { lookup: "looked up", model: "drafted", target: "the target’s own" };
const MORE_WORDS = { ...WORDS, across: "looked up in another request", grammar: "forced by the grammar" };

/** A place for an answer in `parent`. explain: called with a description of the selected token, or null. */
export class Reply {
  constructor(parent, title, explain) {
    this.explain = explain;
    this.tokens = [];
    this.count = { lookup: 0, model: 0, target: 0 };
    this.began = performance.now();
    this.speed = element("b", {});
    this.facts = element("p", { className: "facts" });
    this.bars = Object.fromEntries(Object.keys(WORDS).map((maker) => [maker, element("i", { className: maker })]));
    this.text = element("div", { className: "text", tabIndex: 0, role: "group" });
    this.text.setAttribute("aria-label", `Answer, ${title}. Arrow keys go from token to token.`);
    this.text.setAttribute("aria-busy", "true");
    const share = element("div", { className: "share" }, Object.values(this.bars));
    share.setAttribute("aria-hidden", "true");
    parent.append(
      element("div", { className: "reply" }, [element("h3", {}, [title, this.speed]), this.facts, share, this.text]),
    );
    this.text.addEventListener("keydown", (event) => this.#onKey(event));
    this.text.addEventListener("pointerover", (event) => this.#at(this.tokens.indexOf(event.target)));
    this.text.addEventListener("click", (event) => this.#at(this.tokens.indexOf(event.target)));
    this.text.addEventListener("pointerleave", () => this.#at(-1));
    this.text.addEventListener("blur", () => this.#at(-1));
  }

  get content() {
    return this.text.textContent;
  }

  /** Adds the entries of a chunk's trace. */
  add(entries) {
    const now = performance.now();
    if (!this.tokens.length && entries.length) [this.first, this.alone] = [now, entries.length];
    for (const { token, source, confidence } of entries) {
      const maker = source in this.count ? source : "lookup";
      const span = element("span", { className: `token ${maker}`, textContent: token });
      if (confidence !== null) span.style.setProperty("--sure", confidence);
      span.dataset.source = source;
      span.dataset.confidence = confidence ?? "";
      this.count[maker] += 1;
      this.tokens.push(span);
      this.text.append(span);
    }
    this.latest = now;
    this.#tell();
  }

  /** Completes the answer; metrics: the server's report of its speculation, if any. */
  end(metrics) {
    this.text.setAttribute("aria-busy", "false");
    this.acceptance = metrics?.speculative_decoding;
    this.#tell();
  }

  fail(message) {
    this.text.setAttribute("aria-busy", "false");
    this.text.append(element("p", { className: "error", role: "alert", textContent: message }));
  }

  /** Tokens per second after the first chunk; 0 until there are any. */
  get rate() {
    const behind = this.tokens.length - this.alone;
    return behind > 0 ? (1000 * behind) / (this.latest - this.first) : 0;
  }

  #tell() {
    const total = this.tokens.length;
    if (!total) return;
    if (this.rate) this.speed.textContent = `${this.rate.toFixed(1)} tok/s`;
    const facts = [`${total} tokens`, `first after ${((this.first - this.began) / 1000).toFixed(2)} s`];
    if (this.acceptance) facts.push(`${this.acceptance.mean_acceptance_length.toFixed(2)} tokens per step`);
    for (const [maker, count] of Object.entries(this.count)) {
      const share = (100 * count) / total;
      this.bars[maker].style.width = `${share}%`;
      if (count && maker !== "target") facts.push(`${Math.round(share)} % ${WORDS[maker]}`);
    }
    this.facts.textContent = facts.join(" · ");
  }

  #onKey(event) {
    const at = this.tokens.findIndex((token) => token.classList.contains("at"));
    const to = { ArrowLeft: Math.max(at - 1, 0), ArrowRight: at + 1, Home: 0, End: this.tokens.length - 1 }[event.key];
    if (to === undefined || !this.tokens.length) return;
    event.preventDefault();
    this.#at(Math.min(to, this.tokens.length - 1));
  }

  #at(index) {
    this.text.querySelector(".at")?.classList.remove("at");
    const token = this.tokens[index];
    if (!token) return this.explain(null);
    token.classList.add("at");
    const { source, confidence } = token.dataset;
    const sure = confidence ? `, ${Math.round(100 * confidence)} % sure to be accepted` : "";
    token.title = MORE_WORDS[source] + sure;
    this.explain({ text: token.textContent, about: token.title });
  }
}
