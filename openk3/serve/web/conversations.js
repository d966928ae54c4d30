// Conversations: how they are read, what they hold, and their place in localStorage.

import { CHAT, disk } from "./disk.js";
import { notify } from "./notices.js";
import { count, list, newId, object, text } from "./values.js";

const MOST_KEPT = 100; // conversations
const MOST_CHARS = 4_000_000; // of them all: browsers give a page about 5 million
const EFFORTS = ["off", "low", "high", "max"];

export function readSettings(value) {
  const from = object(value), effort = text(from.effort);
  return {
    effort: EFFORTS.includes(effort) ? effort : "max",
    system: text(from.system), tools: text(from.tools),
    temperature: text(from.temperature), topP: text(from.topP), maxTokens: text(from.maxTokens), seed: text(from.seed),
  };
}

/** What was kept, whatever it is: fields of a wrong kind become empty ones. */
export function readConversation(kept) {
  let from;
  try { from = JSON.parse(kept); } catch { return null; }
  if (!text(object(from).id)) return null;
  return {
    id: from.id, title: text(from.title), updated: count(from.updated) ?? 0, settings: readSettings(from.settings),
    messages: list(from.messages).map(object).map(readMessage).filter(Boolean),
  };
}

export function readMessage(from) {
  if (from.role === "user") {
    const pictures = list(from.pictures).map(object).map((one) => ({ id: text(one.id), name: text(one.name) }));
    return { role: "user", text: text(from.text), pictures };
  }
  if (from.role === "tool") return { role: "tool", call: text(from.call), content: text(from.content) };
  if (from.role !== "assistant") return null;
  const usage = object(from.usage), times = object(from.times);
  return {
    role: "assistant", reasoning: text(from.reasoning), content: text(from.content), model: text(from.model),
    calls: list(from.calls).map(object).map((one) => ({
      id: text(one.id), name: text(one.name), arguments: text(one.arguments), draft: text(one.draft),
    })),
    finish: text(from.finish) || "stopped", // it was being written when the page went away
    error: text(from.error),
    usage: Object.fromEntries(["prompt", "cached", "answer", "reasoning"].map((name) => [name, count(usage[name])])),
    times: Object.fromEntries(["thinking", "first", "rate"].map((name) => [name, count(times[name])])),
  };
}

export const conversations = new Map();
export const runs = new Map(); // conversation id: the answer that is being written
const saving = new Map(); // conversation id: the timer of its next writing
let defaults = readSettings(null);
export let current = newConversation();

export function setDefaults(settings) {
  defaults = settings;
}

export function setCurrent(conversation) {
  current = conversation;
}

export function newConversation() {
  return { id: newId(), title: "", updated: 0, settings: { ...defaults }, messages: [] };
}

export function loadConversations() {
  for (const name of disk.names()) {
    const conversation = name.startsWith(CHAT) ? readConversation(disk.get(name)) : null;
    if (conversation && name === CHAT + conversation.id) conversations.set(conversation.id, conversation);
  }
}

/** Write a conversation; the oldest ones make room for it. */
export function keep(conversation) {
  clearTimeout(saving.get(conversation.id));
  saving.delete(conversation.id);
  if (!conversation.messages.length) return;
  conversations.set(conversation.id, conversation);
  const own = JSON.stringify(conversation);
  const mayGo = (one) => one !== conversation && one !== current && !runs.has(one.id);
  const oldest = [...conversations.values()].filter(mayGo).sort((a, b) => a.updated - b.updated);
  let chars = disk.names().filter((name) => name.startsWith(CHAT) && name !== CHAT + conversation.id)
    .reduce((sum, name) => sum + (disk.get(name)?.length ?? 0), own.length);
  while (oldest.length && (chars > MOST_CHARS || conversations.size > MOST_KEPT)) {
    const gone = oldest.shift();
    chars -= disk.get(CHAT + gone.id)?.length ?? 0;
    forget(gone);
  }
  while (!disk.set(CHAT + conversation.id, own)) {
    if (!oldest.length) {
      notify("This browser has no room to keep this conversation; export it before you leave.");
      return;
    }
    forget(oldest.shift());
  }
}

export function keepSoon(conversation) {
  const write = () => { saving.delete(conversation.id); if (conversations.has(conversation.id)) keep(conversation); };
  if (!saving.has(conversation.id)) saving.set(conversation.id, setTimeout(write, 1000));
}

/** Now, what is being written or waits to be kept. */
export function keepNow() {
  for (const { conversation } of runs.values()) keep(conversation);
  for (const id of saving.keys()) if (conversations.has(id)) keep(conversations.get(id));
}

export function forget(conversation) {
  clearTimeout(saving.get(conversation.id));
  saving.delete(conversation.id);
  conversations.delete(conversation.id);
  disk.remove(CHAT + conversation.id);
}
