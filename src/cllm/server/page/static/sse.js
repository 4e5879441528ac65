// Server-sent events read with fetch, because an EventSource cannot send an API key.

/** Yields {event, data} for each event of a response. */
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      let end = rest.indexOf("\n\n");
      while (end >= 0) {
        yield parse(rest.slice(0, end));
        rest = rest.slice(end + 2);
        end = rest.indexOf("\n\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parse(block) {
  let event = "message";
  let data = "";
  for (const line of block.split("\n")) {
    if (line.startsWith("event: ")) event = line.slice(7);
    else if (line.startsWith("data: ")) data += line.slice(6);
  }
  return { event, data };
}

/** What the server says went wrong, in its own words. */
export async function problemOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status}.`;
  }
}
