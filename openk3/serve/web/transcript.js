// The open conversation on the page: its title and its messages.

import { current, runs } from "./conversations.js";
import { showBusy } from "./message_box.js";
import { $ } from "./nodes.js";
import { announce } from "./notices.js";
import { follow } from "./scrolling.js";
import { showSettings } from "./settings.js";
import { AssistantView, UserView } from "./turns.js";

export const views = new Map(); // message: its view

export function showMessage(conversation, message) {
  if (conversation !== current) return;
  const view = message.role === "user" ? new UserView(message) : new AssistantView(message, conversation);
  views.set(message, view);
  $.messages.append(view.root);
  $.empty.hidden = true;
  $.export.disabled = false;
  follow();
}

export function showAll() {
  views.clear();
  $.messages.replaceChildren();
  $.empty.hidden = current.messages.length > 0;
  $.export.disabled = current.messages.length === 0;
  for (const message of current.messages) if (message.role !== "tool") showMessage(current, message);
  showTitle();
  showSettings();
  showBusy();
  follow();
}

export function showTitle() {
  $.title.textContent = current.title || "New chat";
  document.title = current.title ? `${current.title} - openk3` : "openk3";
}

export function paintSoon(run) {
  if (run.isWaiting) return;
  run.isWaiting = true;
  requestAnimationFrame(() => {
    run.isWaiting = false;
    if (run.conversation !== current || !runs.has(run.conversation.id)) return;
    views.get(run.message)?.update();
    follow();
  });
}

/** Screen readers are told the end; whoever waits at the empty message box is led to the field of a tool's result. */
export function settle(message) {
  const field = views.get(message)?.root.querySelector(".result textarea");
  if (message.error) announce(`Error: ${message.error}`);
  else if (field) announce(`The model calls ${message.calls[0].name}. Type the result.`);
  else announce(message.finish === "stopped" ? "Stopped." : "The answer has ended.");
  const focused = document.activeElement;
  if (field && (focused === document.body || (focused === $.input && !$.input.value))) field.focus();
}
