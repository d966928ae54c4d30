// Pictures of conversations: too large for localStorage, so they are in IndexedDB, and a conversation names them.

import { conversations } from "./conversations.js";
import { CHAT, disk, PREFIX } from "./disk.js";
import { list } from "./values.js";

export const pictures = new Map(); // id: data URL, or null for one that is not kept any more
let database = null;

export function openPictures() {
  return new Promise((resolve) => {
    try {
      const request = indexedDB.open(`${PREFIX}pictures`, 1);
      request.onupgradeneeded = () => request.result.createObjectStore("pictures");
      request.onsuccess = () => { database = request.result; resolve(); };
      request.onerror = () => resolve();
    } catch { resolve(); }
  });
}

export function inPictures(mode, work) {
  return new Promise((resolve) => {
    if (!database) { resolve(null); return; }
    try {
      const transaction = database.transaction("pictures", mode);
      const request = work(transaction.objectStore("pictures"));
      transaction.oncomplete = () => resolve(request.result ?? null);
      transaction.onerror = transaction.onabort = () => resolve(null);
    } catch { resolve(null); }
  });
}

export async function pictureOf(id) {
  if (!pictures.has(id)) {
    const url = await inPictures("readonly", (store) => store.get(id));
    pictures.set(id, typeof url === "string" && url.startsWith("data:image/") ? url : null);
  }
  return pictures.get(id);
}

/** Delete what no conversation names. A conversation is written before its pictures, so none of another tab's go. */
export async function sweepPictures() {
  const ids = list(await inPictures("readonly", (store) => store.getAllKeys()));
  const kept = disk.names().filter((name) => name.startsWith(CHAT)).map((name) => disk.get(name) ?? "");
  const open = [...conversations.values()].map((one) => JSON.stringify(one));
  for (const id of ids) {
    if (![...kept, ...open].some((one) => one.includes(id))) await inPictures("readwrite", (store) => store.delete(id));
  }
}
