// The web chat's start: it sends what is typed, and ties the parts to the page's events.

import { answer, stop, watchAnswers } from "./answers.js";
import {
  conversations, current, keep, keepNow, loadConversations, newConversation, readConversation, readSettings, runs,
  setCurrent, setDefaults,
} from "./conversations.js";
import { CHAT, disk, PREFIX, session } from "./disk.js";
import { exportConversation } from "./export.js";
import { clearBox, listenToBox, pending, showBusy, showDraft } from "./message_box.js";
import { loadModels, model, sees } from "./models.js";
import { $, icon } from "./nodes.js";
import { hideNotice, notify } from "./notices.js";
import { inPictures, openPictures, sweepPictures } from "./pictures.js";
import { follow, listenToScrolling, pin } from "./scrolling.js";
import { listenToSettings, settingsAreGood, showScheme } from "./settings.js";
import { hideSidebar, listenToSidebar, newChat, showConversations } from "./sidebar.js";
import { paintSoon, settle, showAll, showMessage, showTitle, views } from "./transcript.js";

function send() {
  const typed = $.input.value;
  if ((!typed.trim() && !pending.length) || runs.has(current.id) || !settingsAreGood()) return;
  if (pending.length && !sees()) { notify(`${model?.id ?? "This model"} cannot see pictures.`); return; }
  const message = { role: "user", text: typed, pictures: pending.map(({ id, name }) => ({ id, name })) };
  disk.set(`${PREFIX}open`, current.id, session());
  if (!current.title) current.title = typed.trim().split("\n")[0].slice(0, 80);
  const last = current.messages.at(-1);
  current.messages.push(message);
  keep(current); // before its pictures, see sweepPictures
  for (const { id, url } of pending) {
    inPictures("readwrite", (store) => store.put(url, id)).then((done) => {
      if (done === null) notify("This browser does not keep the pictures; after a reload they are gone.");
    });
  }
  clearBox();
  hideNotice();
  pin();
  views.get(last)?.showResults?.();
  showTitle();
  showMessage(current, message);
  answer(current);
}

function listen() {
  listenToBox(send);
  listenToScrolling();
  listenToSettings();
  listenToSidebar();
  watchAnswers({ began, grew: paintSoon, ended, replaced: showAll });
  $.stop.addEventListener("click", () => stop(current));
  $.export.addEventListener("click", exportConversation);
  document.addEventListener("keydown", onKey);
  addEventListener("pagehide", keepNow);
  addEventListener("storage", onOtherTab);
}

function began(conversation, message) {
  showConversations();
  showMessage(conversation, message);
  showBusy();
}

function ended(conversation, message) {
  showConversations();
  if (conversation !== current || !conversation.messages.includes(message)) return;
  views.get(message)?.finish();
  follow();
  showBusy();
  settle(message);
}

function onKey(event) {
  if ((event.ctrlKey || event.metaKey) && !event.shiftKey && !event.altKey && event.key.toLowerCase() === "k") {
    event.preventDefault();
    newChat();
  }
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if ($.sidebar.hasAttribute("data-open")) hideSidebar();
  else if (runs.has(current.id)) stop(current);
  else hideNotice();
}

/** Another tab wrote or deleted a conversation, or turned the lights off. */
function onOtherTab(event) {
  if (event.key === `${PREFIX}scheme`) { applyScheme(); showScheme(); return; }
  if (!event.key?.startsWith(CHAT)) return;
  const id = event.key.slice(CHAT.length), isCurrent = current.id === id;
  if (runs.has(id)) return;
  const conversation = event.newValue && readConversation(event.newValue);
  if (conversation) conversations.set(id, conversation);
  else conversations.delete(id);
  if (isCurrent && !$.messages.querySelector(".edit")) {
    setCurrent(conversation || newConversation());
    showAll();
  }
  showConversations();
}

async function start() {
  for (const node of document.querySelectorAll("[data-icon]")) node.append(icon(node.dataset.icon));
  try { setDefaults(readSettings(JSON.parse(disk.get(`${PREFIX}settings`)))); } catch { /* as at first */ }
  loadConversations();
  setCurrent(conversations.get(disk.get(`${PREFIX}open`, session())) ?? newConversation());
  listen();
  showDraft();
  await openPictures();
  showAll();
  showConversations();
  showScheme();
  $.input.focus();
  await loadModels();
  sweepPictures();
}

start();
