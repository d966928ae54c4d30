// The body of a request for the next answer, and what can be wrong in it.

import { model } from "./models.js";
import { pictureOf } from "./pictures.js";
import { Failure } from "./server.js";
import { object, text } from "./values.js";

/** Tools as they are sent; bare functions are wrapped. Throws an Error for a person to read. */
export function readTools(json) {
  if (!json.trim()) return [];
  let given;
  try { given = JSON.parse(json); } catch (error) { throw new Error(`No valid JSON: ${error.message}`); }
  return (Array.isArray(given) ? given : [given]).map((one, n) => {
    const tool = object(one);
    const wrapped = tool.function === undefined ? { type: "function", function: tool } : tool;
    if (!text(object(wrapped.function).name)) throw new Error(`Tool ${n + 1} has no name.`);
    return wrapped;
  });
}

const NUMBERS = {
  temperature: ["temperature", "Temperature", (x) => x >= 0 && x <= 2, "a number from 0 to 2"],
  topP: ["top_p", "Top-p", (x) => x > 0 && x <= 1, "a number above 0, at most 1"],
  maxTokens: [
    "max_tokens", "Most tokens", (x) => Number.isInteger(x) && x >= 1 && x <= 2 ** 31, "a whole number from 1",
  ],
  seed: ["seed", "Seed", Number.isSafeInteger, "a whole number"],
};

export function readNumbers(settings) {
  const fields = {};
  for (const [name, [field, label, isGood, expected]] of Object.entries(NUMBERS)) {
    if (!settings[name].trim()) continue;
    const value = Number(settings[name]);
    if (!isGood(value)) throw new Error(`${label}: must be ${expected}.`);
    fields[field] = value;
  }
  return fields;
}

/** Whether a call has arrived whole: a name, and arguments that are an object. */
export function isWhole(call) {
  try { JSON.parse(call.arguments); } catch { return false; }
  return call.name !== "" && call.arguments.trim().startsWith("{");
}

/** The messages as the API takes them. Earlier reasoning goes along: so the model was trained, and it is cached. */
export async function messagesOf(conversation) {
  const out = [];
  if (conversation.settings.system.trim()) out.push({ role: "system", content: conversation.settings.system });
  for (const message of conversation.messages) {
    if (message.role === "tool") out.push({ role: "tool", tool_call_id: message.call, content: message.content });
    else if (message.role === "user") out.push({ role: "user", content: await contentOf(message) });
    else {
      const calls = message.calls.filter(isWhole).map((call) => (
        { id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
      if (!message.content && !message.reasoning && !calls.length) continue;
      out.push({
        role: "assistant", content: message.content || (calls.length ? null : ""),
        ...(message.reasoning ? { reasoning_content: message.reasoning } : {}),
        ...(calls.length ? { tool_calls: calls } : {}),
      });
    }
  }
  return out;
}

async function contentOf(message) {
  if (!message.pictures.length) return message.text;
  const parts = [];
  for (const { id, name } of message.pictures) {
    const url = await pictureOf(id);
    const which = name || "of an earlier message";
    if (!url) throw new Failure(`The picture ${which} is not kept any more; start a new chat.`);
    parts.push({ type: "image_url", image_url: { url } });
  }
  return message.text ? [...parts, { type: "text", text: message.text }] : parts;
}

export async function bodyOf(conversation) {
  const { settings } = conversation, tools = readTools(settings.tools);
  return {
    model: model.id,
    messages: await messagesOf(conversation),
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    ...(settings.effort === "off" ? { thinking: { type: "disabled" } } : { reasoning_effort: settings.effort }),
    ...readNumbers(settings),
    ...(tools.length ? { tools } : {}),
  };
}
