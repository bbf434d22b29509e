// The conversation: the question, its settings, and the answers side by side.

import { call, events } from "./api.js";
import { byId, element } from "./dom.js";
import { Reply } from "./reply.js";

const EXAMPLES = [
  "Write a Python function that checks whether a number is prime, and explain it.",
  "Explain in a few sentences how a rainbow comes about.",
  "Repeat this list three times: apples, pears, plums, cherries, quinces.",
];

export function startPlayground() {
  const conversation = byId("conversation");
  const form = byId("ask");
  const prompt = byId("prompt");
  const send = byId("send");
  let messages = [];
  let running = null;

  for (const text of EXAMPLES) {
    const button = element("button", { type: "button", textContent: text });
    button.addEventListener("click", () => ask(text));
    byId("examples").append(element("li", {}, [button]));
  }

  async function ask(question) {
    if (running) return;
    running = new AbortController();
    send.textContent = "Stop";
    byId("welcome").hidden = true;
    messages.push({ role: "user", content: question });
    const replies = element("div", { className: "replies" });
    const turn = element("article", { className: "turn" }, [
      element("p", { className: "question", textContent: question }),
      replies,
    ]);
    conversation.append(turn);
    const both = byId("compare").checked;
    replies.classList.toggle("two", both);
    const arms = both ? [true, false] : [byId("speculation").checked];
    const done = [];
    // One after the other: at the same time they would slow each other down.
    for (const on of arms) {
      const reply = new Reply(replies, on ? "speculation on" : "speculation off", explain);
      done.push(reply);
      try {
        await stream(reply, on, running.signal);
      } catch (error) {
        if (error.name === "AbortError") reply.end();
        else reply.fail(error.message);
        break;
      }
    }
    if (both && !running.signal.aborted) turn.append(element("p", { className: "verdict", textContent: verdict(done) }));
    if (done[0].content) messages.push({ role: "assistant", content: done[0].content });
    else messages.pop();
    running = null;
    send.textContent = "Send";
    toEnd();
    if (!turn.contains(document.activeElement)) explain(null);
  }

  async function stream(reply, speculation, signal) {
    const number = (id) => (byId(id).value === "" ? undefined : Number(byId(id).value));
    const response = await call("/v1/chat/completions", {
      signal,
      body: {
        messages,
        stream: true,
        stream_options: { include_usage: true },
        temperature: number("temperature"),
        seed: number("seed"),
        max_tokens: number("tokens"),
        min_tokens_per_second: number("level"),
        speculation: { enabled: speculation, trace: true },
      },
    });
    let metrics;
    for await (const event of events(response)) {
      const entries = event.choices[0]?.speculation?.trace;
      if (entries) {
        const near = conversation.scrollHeight - conversation.scrollTop - conversation.clientHeight < 60;
        reply.add(entries);
        if (near) toEnd();
      }
      metrics ??= event.metrics;
    }
    reply.end(metrics);
  }

  const toEnd = () => conversation.scrollTo({ top: conversation.scrollHeight });

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) return running.abort();
    const question = prompt.value.trim();
    if (!question) return;
    prompt.value = "";
    ask(question);
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  byId("compare").addEventListener("change", (event) => {
    byId("speculation").disabled = event.target.checked;
  });
  byId("clear").addEventListener("click", () => {
    running?.abort();
    messages = [];
    for (const turn of conversation.querySelectorAll(".turn")) turn.remove();
    byId("welcome").hidden = false;
    prompt.focus();
  });
}

function explain(token) {
  const hint = "Point at a token, or go there by arrow keys, to see who made it.";
  const about = token ? [element("code", { textContent: JSON.stringify(token.text) }), ` ${token.about}`] : [hint];
  byId("detail").replaceChildren(...about);
}

/** Returns how the answer with speculation compares to the one without. */
function verdict([on, off]) {
  const speed = on.rate && off.rate ? `${(on.rate / off.rate).toFixed(2)} × as fast` : "too short to compare";
  const sampled = Number(byId("temperature").value) > 0 && byId("seed").value === "";
  if (sampled) return `${speed}; sampled without a seed, so each text is another draw`;
  return `${speed}, ${on.content === off.content ? "the same text" : "another text"}`;
}
