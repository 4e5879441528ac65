// The connection to the server's stream: opened again when it breaks, closed while nobody looks at the tab.

import { byId, setText } from "./dom.js";
import { eventsOf, problemOf } from "./sse.js";
import { key } from "./key.js";
import { models } from "./models.js";

const LONGEST_PAUSE_S = 10;
const HIDDEN_S = 30;
const SILENT_S = 10;

export async function follow(onEvent) {
  let failures = 0;
  let switchOver = () => {};
  models.onChange(() => switchOver());
  for (;;) {
    await visible();
    if (!models.isReady) await idle();
    const controller = new AbortController();
    switchOver = () => controller.abort();
    const stopWatching = closeWhenHidden(controller);
    let silence;
    try {
      const response = await fetch(`kv/stream${models.query}`, { headers: key.headers(), signal: controller.signal, cache: "no-store" });
      if (response.status === 401) {
        show("locked", "needs a key");
        await key.ask();
        continue;
      }
      if (response.status === 403) {
        const problem = await problemOf(response);
        show("locked", "needs the operator's key");
        if (await key.ask(problem, true)) continue;
        return; // the chat goes on without; another key can be given after "Forget key"
      }
      if (response.status === 409) {
        await idle();
        continue;
      }
      if (!response.ok) throw new Error(await problemOf(response));
      for await (const { event, data } of eventsOf(response)) {
        clearTimeout(silence);
        silence = setTimeout(() => controller.abort(), SILENT_S * 1000);
        failures = 0;
        show("live", "live");
        onEvent(event, JSON.parse(data));
      }
      show("broken", "the server has ended the stream");
      failures += 1;
    } catch (error) {
      const isOurs = error.name === "AbortError";
      show("broken", isOurs ? "paused" : `not connected: ${error.message}`);
      failures = isOurs ? 0 : failures + 1;
    } finally {
      clearTimeout(silence);
      stopWatching();
    }
    await new Promise((resolve) => setTimeout(resolve, Math.min(LONGEST_PAUSE_S, 0.25 * 2 ** failures) * 1000));
  }
}

/** There is nothing to follow until the model is loaded. */
async function idle() {
  show("idle", `${models.chosen || "the model"} is not loaded`);
  setText(byId("model"), models.chosen);
  setText(byId("backend"), "");
  await models.ready();
}

function show(state, text) {
  const node = byId("connection");
  node.dataset.state = state;
  document.body.dataset.stream = state;
  setText(node, text);
}

function visible() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) => {
    document.addEventListener("visibilitychange", resolve, { once: true });
  }).then(visible);
}

/** Abort once the tab was hidden for a while, or at once when it goes to another page: browsers keep pages that were
 * left, with their connections, of which there are six for a server. Returns how to stop looking. */
function closeWhenHidden(controller) {
  let timer;
  const leave = () => controller.abort();
  const look = () => {
    clearTimeout(timer);
    if (document.hidden) timer = setTimeout(() => controller.abort(), HIDDEN_S * 1000);
  };
  document.addEventListener("visibilitychange", look);
  addEventListener("pagehide", leave);
  look();
  return () => {
    clearTimeout(timer);
    removeEventListener("pagehide", leave);
    document.removeEventListener("visibilitychange", look);
  };
}
