// Requests to this server, with its key if it requires one.

const KEPT = "outrider-key";
let asking = null;

/** Returns the response to a GET, or to a POST of `body` as JSON. Prompts for the key if the server requires one; throws
 * an Error with the server's message if it refuses. */
export async function call(path, { body, signal } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEPT);
    const response = await fetch(path, {
      method: body ? "POST" : "GET",
      headers: { ...(body && { "Content-Type": "application/json" }), ...(key && { Authorization: `Bearer ${key}` }) },
      body: body && JSON.stringify(body),
      signal,
    });
    if (response.ok) return response;
    if (response.status !== 401) throw new Error(await reason(response));
    if (sessionStorage.getItem(KEPT) === key) await (asking ??= askForKey(key !== null));
  }
}

/** The JSON of each event of a streamed response. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines.filter((text) => text.startsWith("data: "))) {
      const data = line.slice("data: ".length);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

async function reason(response) {
  const body = await response.json().catch(() => null);
  return body?.error?.message ?? `the server answered ${response.status}`;
}

function askForKey(wrong) {
  const dialog = document.getElementById("key");
  const field = document.getElementById("key-value");
  if (wrong) document.getElementById("key-reason").textContent = "That key is not one of this server’s.";
  field.value = "";
  dialog.showModal();
  dialog.querySelector("form").onsubmit = (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEPT, field.value.trim());
    dialog.close();
  };
  return new Promise((resolve) => {
    dialog.onclose = () => {
      asking = null;
      resolve();
    };
  });
}
