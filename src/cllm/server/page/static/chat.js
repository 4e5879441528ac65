// A chat with the model. What it says is shown as plain text, with its speed and what came from the cache.

import { byId, make, setText } from "./dom.js";
import { eventsOf, problemOf } from "./sse.js";
import { duration, percent, rate, whole } from "./format.js";
import { key } from "./key.js";
import { models } from "./models.js";

export class Chat {
  constructor() {
    this.messages = [];
    this.running = null;
    this.box = byId("messages");
    this.field = byId("prompt");
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.running?.abort();
    });
    addEventListener("pagehide", () => this.running?.abort());
    byId("stop").addEventListener("click", () => this.running?.abort());
    byId("chat-clear").addEventListener("click", () => this.clear());
  }

  clear() {
    this.running?.abort();
    this.messages = [];
    this.box.replaceChildren();
    this.field.focus();
  }

  /** What holds where nothing is chosen. */
  async showDefaults() {
    try {
      const response = await fetch(`model/info${models.query}`, { headers: key.headers(), cache: "no-store" });
      if (!response.ok) return;
      const { data } = await response.json();
      byId("temperature").placeholder = data.sampling_defaults.temperature ?? "";
    } catch {
      // The stream says so when the server cannot be reached.
    }
  }

  async send() {
    const text = this.field.value.trim();
    if (!text || this.running) return;
    this.field.value = "";
    const messages = [...this.messages, { role: "user", content: text }];
    this.messages = messages;
    this.show("user", text);
    const answer = { content: "", reasoning: "", bubble: this.show("assistant", ""), began: performance.now(), first: 0, last: 0, pieces: 0, usage: null };
    this.setRunning(new AbortController());
    let failure = "";
    try {
      await this.stream(messages, answer);
    } catch (error) {
      failure = error.name === "AbortError" ? "stopped" : error.message;
      answer.bubble.classList.toggle("failed", error.name !== "AbortError");
    }
    this.setRunning(null);
    if (this.messages === messages && answer.content) {
      const { content, reasoning } = answer;
      this.messages.push({ role: "assistant", content, ...(reasoning && { reasoning_content: reasoning }) });
    }
    answer.bubble.append(make("small", "", [failure, summary(answer)].filter(Boolean).join(" · ")));
    setText(byId("chat-stats"), failure ? `The answer ended: ${failure}` : summary(answer));
    this.field.focus();
  }

  async stream(messages, answer) {
    const limit = byId("max-tokens").valueAsNumber;
    const temperature = byId("temperature").valueAsNumber;
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json", ...key.headers() },
      body: JSON.stringify({
        messages,
        ...(models.chosen && { model: models.chosen }),
        stream: true,
        stream_options: { include_usage: true },
        ...(limit > 0 && { max_tokens: limit }),
        ...(temperature >= 0 && { temperature }),
      }),
      signal: this.running.signal,
    });
    if (!response.ok) throw new Error(await problemOf(response));
    const text = answer.bubble.appendChild(document.createTextNode(""));
    let reasoning = null;
    for await (const { data } of eventsOf(response)) {
      if (data === "[DONE]") break;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      answer.usage = event.usage ?? answer.usage;
      const { reasoning_content: thought, content: said } = event.choices?.[0]?.delta ?? {};
      if (thought) {
        reasoning ??= showReasoning(text);
        answer.reasoning += thought;
        this.append(answer, reasoning, thought);
      }
      if (said) {
        answer.content += said;
        this.append(answer, text, said);
      }
    }
  }

  append(answer, text, piece) {
    answer.last = performance.now();
    answer.first ||= answer.last;
    answer.pieces += 1;
    const atEnd = this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 40;
    text.appendData(piece);
    if (atEnd) this.box.scrollTop = this.box.scrollHeight;
    setText(byId("chat-stats"), summary(answer));
  }

  show(role, text) {
    const bubble = make("div", `message ${role}`, text);
    this.box.append(bubble);
    this.box.scrollTop = this.box.scrollHeight;
    return bubble;
  }

  setRunning(controller) {
    this.running = controller;
    byId("stop").disabled = !controller;
    byId("send").disabled = Boolean(controller);
    // Screen readers wait for the whole answer instead of reading every piece.
    this.box.setAttribute("aria-busy", String(Boolean(controller)));
  }
}

/** A folded place before the answer; returns the text node that the reasoning goes into. */
function showReasoning(answer) {
  const folded = make("details", "reasoning");
  const text = document.createTextNode("");
  folded.append(make("summary", "", "Reasoning"), text);
  answer.before(folded);
  return text;
}

function summary(answer) {
  if (!answer.first && !answer.usage) return "";
  const tokens = answer.usage?.completion_tokens ?? answer.pieces;
  const seconds = (answer.last - answer.first) / 1000;
  const parts = [`${whole(tokens)} tokens`];
  if (tokens > 1 && seconds > 0) parts.push(`${rate((tokens - 1) / seconds)} tokens/s`);
  if (answer.first) parts.push(`first after ${duration((answer.first - answer.began) / 1000)}`);
  if (answer.usage) {
    const { prompt_tokens: prompt, prompt_tokens_details: details } = answer.usage;
    const cached = details?.cached_tokens ?? 0;
    parts.push(`${whole(cached)} of ${whole(prompt)} prompt tokens from the cache (${percent(cached, prompt)})`);
  }
  return parts.join(" · ");
}
