// The list of conversations: open, begin, delete, bring back.

import { stop } from "./answers.js";
import { conversations, current, forget, keep, newConversation, runs, setCurrent } from "./conversations.js";
import { disk, PREFIX, session } from "./disk.js";
import { $, h, iconButton } from "./nodes.js";
import { announce, hideNotice, notify } from "./notices.js";
import { sweepPictures } from "./pictures.js";
import { pin } from "./scrolling.js";
import { showAll } from "./transcript.js";

export function showConversations() {
  const sorted = [...conversations.values()].sort((a, b) => b.updated - a.updated);
  const focused = document.activeElement?.closest?.("#conversations li")?.dataset.id;
  $.conversations.replaceChildren(...sorted.map((one) => {
    const title = one.title || "Pictures";
    const isCurrent = one === current, onclick = () => openConversation(one);
    return h("li", { "data-id": one.id, "data-current": isCurrent, "data-busy": runs.has(one.id) },
      h("button", { class: "open", type: "button", title, "aria-current": isCurrent ? "true" : null, onclick }, title),
      iconButton("trash", `Delete ${title}`, () => deleteConversation(one)));
  }));
  if (focused) $.conversations.querySelector(`li[data-id="${CSS.escape(focused)}"] .open`)?.focus();
}

function openConversation(conversation) {
  setCurrent(conversation);
  disk.set(`${PREFIX}open`, current.id, session());
  pin();
  showSidebar(false);
  showAll();
  showConversations();
  $.input.focus();
}

export function newChat() {
  for (const dialog of document.querySelectorAll("dialog[open]")) dialog.close();
  openConversation(newConversation());
}

function deleteConversation(conversation) {
  const wasCurrent = conversation === current;
  stop(conversation);
  forget(conversation);
  if (wasCurrent) newChat();
  else showConversations();
  const sweeping = setTimeout(sweepPictures, 10000);
  notify(`Deleted: ${conversation.title || "Pictures"}`, "Undo", () => {
    clearTimeout(sweeping);
    hideNotice();
    keep(conversation);
    openConversation(conversation);
  });
}

function deleteAll() {
  if (!confirm("Delete all conversations that this browser keeps?")) return;
  for (const conversation of conversations.values()) { stop(conversation); forget(conversation); }
  stop(current);
  newChat();
  sweepPictures();
  announce("All conversations were deleted.");
}

function showSidebar(isOpen) {
  $.sidebar.toggleAttribute("data-open", isOpen);
  $.veil.hidden = !isOpen;
  $["open-sidebar"].setAttribute("aria-expanded", String(isOpen));
  if (isOpen) $["new-chat"].focus();
}

export function listenToSidebar() {
  $["new-chat"].addEventListener("click", newChat);
  $["delete-all"].addEventListener("click", deleteAll);
  $["open-sidebar"].addEventListener("click", () => showSidebar(true));
  for (const id of ["close-sidebar", "veil"]) $[id].addEventListener("click", hideSidebar);
}

export function hideSidebar() {
  showSidebar(false);
  $["open-sidebar"].focus();
}
