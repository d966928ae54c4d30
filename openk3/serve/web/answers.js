// Answers: asked for, written down as they come, stopped, and asked for again.

import { conversations, current, keep, keepSoon, readMessage, runs } from "./conversations.js";
import { loadModels, model } from "./models.js";
import { announce, hideNotice, notify } from "./notices.js";
import { bodyOf } from "./request.js";
import { pin } from "./scrolling.js";
import { askWithKey, eventsOf, Failure } from "./server.js";
import { count, list, object, text } from "./values.js";

const CUT = "The connection broke off before the answer had ended.";
const MOST_CALLS = 1000; // of one answer
const NO_CALL = { id: "", name: "", arguments: "", draft: "" };
const shown = { began() {}, grew() {}, ended() {}, replaced() {} };

/** What shows answers: began(conversation, message), grew(run), ended(conversation, message), replaced(). */
export function watchAnswers(watcher) {
  Object.assign(shown, watcher);
}

/** Ask for the next answer of a conversation, and write it down as it comes. */
export async function answer(conversation) {
  if (runs.has(conversation.id)) return;
  if (!model) { await loadModels(); if (!model) return; }
  const message = readMessage({ role: "assistant", model: model.id });
  const run = newRun(conversation, message);
  const body = await bodyOf(conversation).catch((error) => { message.error = error.message; return null; });
  message.finish = body ? "" : "error";
  conversation.messages.push(message);
  conversation.updated = Date.now();
  if (body) runs.set(conversation.id, run);
  keep(conversation);
  shown.began(conversation, message);
  if (!body) return;
  announce("The model is asked.");
  const ticking = setInterval(() => shown.grew(run), 250);
  try {
    await receive(run, body);
  } catch (error) {
    const isCut = !(error instanceof Failure) && !run.controller.signal.aborted;
    if (isCut) await new Promise((resolve) => setTimeout(resolve, 300)); // or does the page go away?
    if (run.controller.signal.aborted) message.finish = "stopped";
    else {
      message.finish = "error";
      message.error = error instanceof Failure ? error.message : CUT;
    }
  }
  clearInterval(ticking);
  if (runs.get(conversation.id) === run) runs.delete(conversation.id);
  closeThinking(run);
  if (conversations.get(conversation.id) === conversation) keep(conversation); // or it was deleted meanwhile
  shown.ended(conversation, message);
}

function newRun(conversation, message) {
  const times = { began: performance.now(), firstAt: 0, thinkingAt: 0 };
  return { conversation, message, controller: new AbortController(), pieces: 0, firstCount: 0, ...times };
}

async function receive(run, body) {
  const response = await askWithKey("v1/chat/completions", { body, signal: run.controller.signal });
  let isOver = false;
  for await (const data of eventsOf(response.body)) {
    if (data === "[DONE]") { isOver = true; break; }
    const chunk = object(JSON.parse(data));
    if (chunk.error) throw new Failure(text(object(chunk.error).message) || "The server failed.");
    take(run, chunk);
    keepSoon(run.conversation);
    shown.grew(run);
  }
  if (!isOver) throw new TypeError("the stream was cut");
  run.message.finish ||= "stop";
}

function take(run, chunk) {
  const { message } = run, now = performance.now();
  const choice = object(list(chunk.choices)[0]), delta = object(choice.delta);
  const reasoning = text(delta.reasoning_content), content = text(delta.content), calls = list(delta.tool_calls);
  if (chunk.usage) message.usage = usageOf(object(chunk.usage));
  if (reasoning || content || calls.length) {
    run.pieces += 1;
    const tokens = message.usage.answer ?? run.pieces;
    if (!run.firstAt) {
      [run.firstAt, run.firstCount] = [now, tokens];
      message.times.first = (now - run.began) / 1000;
    }
    if (now > run.firstAt) message.times.rate = (tokens - run.firstCount) / ((now - run.firstAt) / 1000);
  }
  if (reasoning) {
    run.thinkingAt ||= now;
    message.reasoning += reasoning;
    message.times.thinking = (now - run.thinkingAt) / 1000;
  }
  if (content || calls.length) closeThinking(run);
  message.content += content;
  for (const part of calls.map(object)) {
    const index = count(part.index) ?? 0, made = object(part.function);
    while (message.calls.length <= index && message.calls.length < MOST_CALLS) message.calls.push({ ...NO_CALL });
    const call = message.calls[index];
    if (!call) continue;
    call.id ||= text(part.id);
    call.name ||= text(made.name);
    call.arguments += text(made.arguments);
  }
  if (text(choice.finish_reason)) message.finish = choice.finish_reason;
}

function closeThinking(run) {
  if (!run.thinkingAt) return;
  run.message.times.thinking = (performance.now() - run.thinkingAt) / 1000;
  run.thinkingAt = 0;
}

function usageOf(usage) {
  return {
    prompt: count(usage.prompt_tokens), answer: count(usage.completion_tokens),
    cached: count(object(usage.prompt_tokens_details).cached_tokens),
    reasoning: count(object(usage.completion_tokens_details).reasoning_tokens),
  };
}

export function stop(conversation) {
  runs.get(conversation.id)?.controller.abort();
}

/** Put another end to a conversation and ask again. Later turns that get lost can be brought back. */
export function replaceFrom(index, added = []) {
  const conversation = current, before = conversation.messages.slice();
  stop(conversation);
  runs.delete(conversation.id);
  conversation.messages = [...before.slice(0, index), ...added];
  pin();
  shown.replaced();
  answer(conversation);
  if (before.slice(index + 1).some((message) => message.role === "user")) {
    notify("Later messages were removed.", "Undo", () => {
      stop(conversation);
      runs.delete(conversation.id);
      conversation.messages = before;
      keep(conversation);
      if (conversation === current) shown.replaced();
      hideNotice();
    });
  }
}
