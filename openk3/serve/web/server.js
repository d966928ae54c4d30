// Requests to the server, the key it may ask for, and what it streams.

import { disk, PREFIX, session } from "./disk.js";
import { $ } from "./nodes.js";
import { object, text } from "./values.js";

export class Failure extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export const keyOf = () => disk.get(`${PREFIX}key`, session()) ?? "";
export const forgetKey = () => disk.remove(`${PREFIX}key`, session());

/** The response of a request that went well; otherwise a Failure that says why, in the server's words if there are. */
async function ask(path, { body, signal, key = keyOf() } = {}) {
  const headers = {
    ...(body ? { "content-type": "application/json" } : {}),
    ...(key ? { authorization: `Bearer ${key}` } : {}),
  };
  const options = { method: body ? "POST" : "GET", headers, signal, cache: "no-store", redirect: "error" };
  let response;
  try {
    response = await fetch(path, { ...options, body: body && JSON.stringify(body) });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Failure("The server cannot be reached.");
  }
  if (response.ok) return response;
  let message = "";
  try { message = text(object(object(await response.json()).error).message); } catch { /* no object of ours */ }
  throw new Failure(message || `The server answered ${response.status} ${response.statusText}`.trim(), response.status);
}

/** The same; where the server wants a key, the user is asked for one. */
export async function askWithKey(path, options = {}) {
  for (;;) {
    try {
      return await ask(path, options);
    } catch (error) {
      if (error.status !== 401) throw error;
      await askForKey(keyOf() ? "The server refused this key. Check it and try again." : "");
    }
  }
}

let keyAsked = null;

/** Ask once, however many calls wait for it; resolves when the server takes the key. */
function askForKey(problem) {
  keyAsked ??= new Promise((resolve, reject) => {
    showKeyError(problem);
    $.key.value = "";
    $["key-dialog"].showModal();
    $["key-form"].onsubmit = async (event) => {
      event.preventDefault();
      const key = $.key.value.trim();
      if (!/^[\x21-\x7e]+$/.test(key)) { showKeyError("A key is one word of letters, digits and signs."); return; }
      try {
        await ask("v1/models", { key });
        disk.set(`${PREFIX}key`, key, session());
        resolve();
        $["key-dialog"].close();
      } catch (error) {
        showKeyError(error.status === 401 ? "The server refused this key. Check it and try again." : error.message);
        $.key.select();
      }
    };
    $["key-dialog"].onclose = () => { keyAsked = null; reject(new Failure("The server asks for an API key.", 0)); };
  });
  return keyAsked;
}

function showKeyError(said) {
  $["key-error"].textContent = said;
  $["key-error"].hidden = !said;
}

/** Data of server-sent events, however the bytes were cut on the way. */
export async function* eventsOf(stream) {
  const reader = stream.getReader(), decoder = new TextDecoder();
  let rest = "", data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      rest += value ? decoder.decode(value, { stream: true }) : decoder.decode();
      const lines = rest.split("\n");
      rest = lines.pop();
      for (const raw of lines) {
        const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line === "" && data.length) { yield data.join("\n"); data = []; }
      }
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
