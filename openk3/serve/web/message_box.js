// The message box: its buttons, and the pictures that wait in it.

import { current, runs } from "./conversations.js";
import { disk, PREFIX, session } from "./disk.js";
import { model, sees } from "./models.js";
import { $, grow, h, iconButton, isEnter } from "./nodes.js";
import { notify } from "./notices.js";
import { pictures } from "./pictures.js";
import { count, newId } from "./values.js";

const PICTURES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp", "image/avif"];
export let pending = []; // pictures that go with the next message

export function showBusy() {
  const isBusy = runs.has(current.id);
  if (isBusy === $.send.hidden && isBusy !== $.stop.hidden) { showSend(); return; }
  const wasFocused = document.activeElement === (isBusy ? $.send : $.stop);
  $.stop.hidden = !isBusy;
  $.send.hidden = isBusy;
  if (wasFocused) $.input.focus();
  $.messages.setAttribute("aria-busy", String(isBusy));
  showSend();
}

function showSend() {
  $.send.disabled = !$.input.value.trim() && !pending.length;
}

/** What is typed and the pictures are sent: the box is empty again. */
export function clearBox() {
  pending = [];
  $.input.value = "";
  disk.remove(`${PREFIX}draft`, session());
  grow($.input);
  showPreviews();
}

export function showDraft() {
  $.input.value = disk.get(`${PREFIX}draft`, session()) ?? "";
  grow($.input);
  showSend();
}

async function addPictures(files) {
  for (const file of files) {
    const name = file.name || "Picture";
    if (!sees()) { notify(`${model?.id ?? "This model"} cannot see pictures.`); return; }
    const used = current.messages.reduce((sum, message) => sum + (message.pictures?.length ?? 0), pending.length);
    const most = count(model.max_images) ?? Infinity, bytes = count(model.max_image_bytes) ?? Infinity;
    if (!PICTURES.includes(file.type)) notify(`${name}: only PNG, JPEG, WebP, GIF, BMP and AVIF pictures can be sent.`);
    else if (used >= most) notify(`A conversation may have ${most} pictures.`);
    else if (file.size > bytes) notify(`${name} is larger than the server takes (${Math.floor(bytes / 2 ** 20)} MiB).`);
    else await addPicture(file, name);
  }
  showPreviews();
  showSend();
  $.input.focus();
}

async function addPicture(file, name) {
  const url = await new Promise((resolve) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => resolve(null);
    reader.readAsDataURL(file);
  });
  try {
    const image = new Image();
    image.src = url;
    await image.decode();
  } catch {
    notify(`${name} cannot be read as a picture.`);
    return;
  }
  const id = newId();
  pictures.set(id, url);
  pending.push({ id, name, url });
}

function showPreviews() {
  $.previews.hidden = !pending.length;
  $.previews.replaceChildren(...pending.map((one) => h("li", {}, h("img", { src: one.url, alt: one.name }),
    iconButton("close", `Remove ${one.name}`, () => {
      pending = pending.filter((other) => other !== one);
      showPreviews();
      showSend();
      $.input.focus();
    }))));
}

function listenToPictures() {
  $.attach.addEventListener("click", () => $.files.click());
  $.files.addEventListener("change", () => {
    const chosen = [...$.files.files];
    $.files.value = "";
    addPictures(chosen);
  });
  const hasFiles = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  let depth = 0; // enter and leave come for every element below
  document.addEventListener("dragenter", (event) => {
    if (!hasFiles(event)) return;
    depth += 1;
    $.drop.hidden = !sees();
  });
  document.addEventListener("dragleave", (event) => {
    if (!hasFiles(event)) return;
    depth = Math.max(0, depth - 1);
    $.drop.hidden ||= depth === 0;
  });
  document.addEventListener("dragover", (event) => { if (hasFiles(event)) event.preventDefault(); });
  document.addEventListener("drop", (event) => {
    depth = 0;
    $.drop.hidden = true;
    if (!hasFiles(event)) return;
    event.preventDefault(); // or the browser leaves for the file
    addPictures([...event.dataTransfer.files]);
  });
  document.addEventListener("paste", (event) => {
    const pasted = [...(event.clipboardData?.files ?? [])];
    if (!pasted.length || event.clipboardData.getData("text/plain") || document.querySelector("dialog[open]")) return;
    event.preventDefault();
    addPictures(pasted);
  });
}

/** `send` is what Enter does. */
export function listenToBox(send) {
  $.composer.addEventListener("submit", (event) => { event.preventDefault(); send(); });
  $.input.addEventListener("input", () => {
    grow($.input);
    showSend();
    disk.set(`${PREFIX}draft`, $.input.value, session());
  });
  $.input.addEventListener("keydown", (event) => { if (isEnter(event)) { event.preventDefault(); send(); } });
  listenToPictures();
}
