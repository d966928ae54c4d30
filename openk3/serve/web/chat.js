// openk3's web chat. What a model or a user wrote is data: it is shown by building nodes with text, never as HTML.
"use strict";
(() => {
const PREFIX = "openk3.";
const CHAT = `${PREFIX}chat.`;
const MOST_KEPT = 100; // conversations
const MOST_CHARS = 4_000_000; // of them all: browsers give a page about 5 million
const PICTURES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp", "image/avif"];
const EFFORTS = ["off", "low", "high", "max"];

// ---- storage: a browser may refuse it, and then the chat works without

const disk = {
  get(name, area = localStorage_()) { try { return area.getItem(name); } catch { return null; } },
  set(name, value, area = localStorage_()) { try { area.setItem(name, value); return true; } catch { return false; } },
  remove(name, area = localStorage_()) { try { area.removeItem(name); } catch { /* nothing was kept */ } },
  names() { try { return Object.keys(localStorage); } catch { return []; } },
};
function localStorage_() { try { return localStorage; } catch { return null; } }
function sessionStorage_() { try { return sessionStorage; } catch { return null; } }

function applyScheme() {
  const scheme = disk.get(`${PREFIX}scheme`);
  if (scheme === "light" || scheme === "dark") document.documentElement.dataset.scheme = scheme;
  else delete document.documentElement.dataset.scheme;
}
applyScheme(); // before anything is painted

// ---- nodes

function h(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  return fill(node, children);
}

function fill(node, children) {
  for (const child of children) if (child !== null && child !== undefined && child !== false) node.append(child);
  return node;
}

function icon(name) {
  return document.getElementById(`icon-${name}`).content.firstElementChild.cloneNode(true);
}

function iconButton(name, label, onclick, more = {}) {
  return h("button", { class: "icon small", type: "button", "aria-label": label, title: label, onclick, ...more }, icon(name));
}

function copyButton(text, label = "Copy") {
  const button = iconButton("copy", label, async () => {
    const done = await copy(text());
    button.replaceChildren(icon(done ? "check" : "close"));
    announce(done ? "Copied." : "The browser did not let this be copied.");
    setTimeout(() => button.replaceChildren(icon("copy")), 1500);
  });
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { // no secure context, or not allowed: the old way
    const area = h("textarea", { class: "unseen", "aria-hidden": "true" });
    area.value = text;
    const focused = document.activeElement;
    (document.querySelector("dialog[open]") ?? document.body).append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    focused?.focus?.();
    return done;
  }
}

// ---- Markdown: a small part of it, made of nodes

const MOST_DEPTH = 8; // of lists and quotes
const MOST_FRAMES = 24; // of emphasis and brackets
const FENCE = /^ {0,3}(`{3,}|~{3,})(.*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const ITEM = /^( {0,3})(?:[-*+]|(\d{1,9})[.)])(?: +|$)/;
const isBlank = (line) => line.trim() === "";
const indentOf = (line) => line.length - line.trimStart().length;

function fenceOf(line) {
  const found = FENCE.exec(line);
  return found && !(found[1][0] === "`" && found[2].includes("`")) ? found : null;
}

function cellsOf(line) {
  let text = line.trim();
  if (text.startsWith("|")) text = text.slice(1);
  if (text.endsWith("|") && !text.endsWith("\\|")) text = text.slice(0, -1);
  return text.split(/(?<!\\)\|/).map((cell) => cell.replaceAll("\\|", "|").trim());
}

function isTable(line, next) {
  if (next === undefined || !line.includes("|") || !next.includes("-")) return false;
  const rule = cellsOf(next);
  return rule.every((cell) => /^:?-+:?$/.test(cell)) && rule.length === cellsOf(line).length;
}

function startsBlock(lines, i) {
  const line = lines[i];
  return fenceOf(line) || HEADING.test(line) || RULE.test(line) || ITEM.test(line) || /^ {0,3}>/.test(line)
    || isTable(line, lines[i + 1]);
}

/** Blocks of lines: {kind, from, to, ...}; a block ends only where it cannot go on, so all but the last are settled. */
function blocksOf(lines) {
  const blocks = [];
  for (let i = 0; i < lines.length;) {
    if (isBlank(lines[i])) { i += 1; continue; }
    const block = blockAt(lines, i);
    blocks.push({ ...block, from: i });
    i = block.to;
  }
  return blocks;
}

function blockAt(lines, i) {
  const line = lines[i];
  const fence = fenceOf(line);
  if (fence) return fencedAt(lines, i, fence);
  const heading = HEADING.exec(line);
  if (heading) {
    let text = heading[2].trim();
    while (text.endsWith("#")) text = text.slice(0, -1);
    return { kind: "heading", level: heading[1].length, text: text.trim(), to: i + 1 };
  }
  if (RULE.test(line)) return { kind: "rule", to: i + 1 };
  if (/^ {0,3}>/.test(line)) {
    let to = i;
    while (to < lines.length && /^ {0,3}>/.test(lines[to])) to += 1;
    return { kind: "quote", lines: lines.slice(i, to).map((one) => one.replace(/^ {0,3}> ?/, "")), to };
  }
  if (ITEM.test(line)) return listAt(lines, i);
  if (isTable(line, lines[i + 1])) {
    let to = i + 2;
    while (to < lines.length && lines[to].includes("|") && !isBlank(lines[to])) to += 1;
    return { kind: "table", lines: lines.slice(i, to), to };
  }
  let to = i + 1;
  while (to < lines.length && !isBlank(lines[to]) && !startsBlock(lines, to)) to += 1;
  return { kind: "paragraph", text: lines.slice(i, to).map((one) => one.trim()).join("\n"), to };
}

function fencedAt(lines, i, [, marks, info]) {
  const indent = indentOf(lines[i]);
  const code = [];
  let to = i + 1;
  for (; to < lines.length; to += 1) {
    const line = lines[to].trim();
    if (line.length >= marks.length && line[0] === marks[0] && line.split(marks[0]).join("") === "") {
      return { kind: "code", language: info.trim(), text: code.join("\n"), to: to + 1 };
    }
    code.push(lines[to].slice(Math.min(indent, indentOf(lines[to]))));
  }
  return { kind: "code", language: info.trim(), text: code.join("\n"), to };
}

function listAt(lines, i) {
  const first = ITEM.exec(lines[i]);
  const isOrdered = first[2] !== undefined;
  const items = [];
  let need = 0, width = 0, to = i;
  for (; to < lines.length; to += 1) {
    const line = lines[to].replace(/^\t+/, (tabs) => "    ".repeat(tabs.length));
    const indent = indentOf(line);
    const item = RULE.test(line) ? null : ITEM.exec(line);
    if (item && (items.length === 0 || indent < need)) {
      if ((item[2] !== undefined) !== isOrdered) break;
      items.push([line.slice(item[0].length)]);
      width = item[0].length;
      need = Math.min(width, indent + 2);
    } else if (isBlank(line)) {
      const next = lines.slice(to + 1, to + 3).find((one) => !isBlank(one));
      if (next === undefined || !(indentOf(next) >= need || ITEM.test(next))) break;
      items.at(-1).push("");
    } else if (indent >= need) {
      items.at(-1).push(line.slice(Math.min(width, indent)));
    } else if (!isBlank(lines[to - 1]) && !startsBlock(lines, to)) {
      items.at(-1).push(line);
    } else break;
  }
  return { kind: "list", start: isOrdered ? Number(first[2]) : null, items, to };
}

function blockNode(block, depth) {
  switch (block.kind) {
    case "code": return codeNode(block);
    case "heading": return fill(h(`h${Math.min(6, block.level + 2)}`), inline(block.text));
    case "rule": return h("hr");
    case "table": return tableNode(block.lines);
    case "quote": return depth >= MOST_DEPTH ? h("p", {}, block.lines.join("\n")) : fill(h("blockquote"), nodesOf(block.lines, depth + 1));
    case "list": {
      const list = block.start === null ? h("ul") : h("ol", { start: block.start === 1 ? null : block.start });
      for (const lines of block.items) list.append(itemNode(lines, depth + 1));
      return list;
    }
    default: return fill(h("p"), inline(block.text));
  }
}

function itemNode(lines, depth) {
  const item = h("li");
  if (depth >= MOST_DEPTH) return fill(item, [lines.join("\n")]);
  blocksOf(lines).forEach((block, n) => {
    if (n === 0 && block.kind === "paragraph") fill(item, inline(block.text));
    else item.append(blockNode(block, depth));
  });
  return item;
}

const nodesOf = (lines, depth) => blocksOf(lines).map((block) => blockNode(block, depth));

function codeNode(block) {
  const language = block.language.split(/\s/)[0].slice(0, 40);
  const code = h("code", {}, block.text);
  return h("div", { class: "code-block" },
    h("div", { class: "bar" }, h("span", {}, language || "code"), copyButton(() => code.textContent, "Copy the code")),
    h("pre", { tabindex: "0", "aria-label": language ? `Code in ${language}` : "Code" }, code));
}

function tableNode(lines) {
  const aligns = cellsOf(lines[1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : null));
  const row = (line, tag) => {
    const cells = cellsOf(line);
    return fill(h("tr"), aligns.map((align, n) => fill(h(tag, { "data-align": align }), inline(cells[n] ?? ""))));
  };
  return h("div", { class: "table", tabindex: "0", role: "group", "aria-label": "Table" },
    h("table", {}, h("thead", {}, row(lines[0], "th")), fill(h("tbody"), lines.slice(2).map((line) => row(line, "td")))));
}

const isSpace = (char) => char === undefined || /\s/.test(char);
const isWord = (char) => char !== undefined && /[\p{L}\p{N}_]/u.test(char);
const TAGS = { "*": "em", _: "em", "**": "strong", __: "strong", "~~": "del" };

/** Reads one paragraph: frames are what is open, and what never closes is text again. */
class Inline {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.frames = [{ mark: "", nodes: [] }];
    this.plain = "";
    this.missing = new Set(); // lengths of runs of backticks that close nothing any more
  }

  read() {
    while (this.at < this.text.length) if (!this.special()) this.plain += this.text[this.at++];
    this.collapse(0);
    return this.frames[0].nodes;
  }

  get top() { return this.frames.at(-1); }

  push(node) {
    if (this.plain) this.top.nodes.push(this.plain);
    this.plain = "";
    if (node !== undefined) this.top.nodes.push(node);
  }

  collapse(k) { // frames above k were never closed
    this.push();
    while (this.frames.length > k + 1) {
      const frame = this.frames.pop();
      this.top.nodes.push(frame.mark);
      for (const node of frame.nodes) this.top.nodes.push(node);
    }
  }

  open(mark) {
    if (this.frames.length >= MOST_FRAMES) { this.plain += mark; return; }
    this.push();
    this.frames.push({ mark, nodes: [] });
  }

  close(k, node) {
    this.collapse(k);
    fill(node, this.frames.pop().nodes);
    this.push(node);
    return node;
  }

  special() {
    const { text, at } = this;
    switch (text[at]) {
      case "\\": return this.escape();
      case "`": return this.code();
      case "*": case "_": case "~": return this.emphasis();
      case "\n": this.plain = this.plain.trimEnd(); this.push(h("br")); this.at += 1; return true;
      case "!": if (text[at + 1] !== "[") return false; this.open("!["); this.at += 2; return true;
      case "[": this.open("["); this.at += 1; return true;
      case "]": this.bracket(); return true;
      case "<": case "h": return this.address();
      default: return false;
    }
  }

  escape() {
    const next = this.text[this.at + 1];
    if (next === undefined || !/[!-/:-@[-`{-~]/.test(next)) return false;
    this.plain += "()[]".includes(next) ? `\\${next}` : next; // formulas keep theirs
    this.at += 2;
    return true;
  }

  run(char) {
    let end = this.at;
    while (this.text[end] === char) end += 1;
    return end - this.at;
  }

  code() {
    const { text } = this, size = this.run("`"), marks = "`".repeat(size), from = this.at + size;
    let end = this.missing.has(size) ? -1 : text.indexOf(marks, from);
    while (end >= 0 && (text[end + size] === "`" || text[end - 1] === "`")) {
      while (text[end] === "`") end += 1;
      end = text.indexOf(marks, end);
    }
    if (end < 0) {
      this.missing.add(size);
      this.plain += marks;
      this.at = from;
      return true;
    }
    let inner = text.slice(from, end).replaceAll("\n", " ");
    if (inner.startsWith(" ") && inner.endsWith(" ") && inner.trim()) inner = inner.slice(1, -1);
    this.push(h("code", {}, inner));
    this.at = end + size;
    return true;
  }

  emphasis() {
    const char = this.text[this.at], size = this.run(char);
    if (size > 3 || (char === "~" && size !== 2)) {
      this.plain += char.repeat(size);
      this.at += size;
      return true;
    }
    const before = this.text[this.at - 1], after = this.text[this.at + size];
    const mayClose = !isSpace(before) && !(char === "_" && isWord(after));
    const mayOpen = !isSpace(after) && !(char === "_" && isWord(before));
    let left = size;
    this.at += size;
    while (left && mayClose) {
      const k = this.frames.findLastIndex((frame) => frame.mark[0] === char && frame.mark.length <= left);
      if (k < 0) break;
      left -= this.frames[k].mark.length;
      this.close(k, h(TAGS[this.frames[k].mark]));
    }
    if (left && mayOpen) {
      if (left === 3) this.open(char);
      this.open(char.repeat(Math.min(left, 2)));
    } else this.plain += char.repeat(left);
    return true;
  }

  bracket() {
    const k = this.frames.findLastIndex((frame) => frame.mark.endsWith("[") && !frame.dead);
    const found = k > 0 && this.text[this.at + 1] === "(" ? this.destination(this.at + 2) : null;
    const link = found && linkTo(found.url);
    if (link) {
      this.close(k, link);
      for (const inner of link.querySelectorAll("a")) inner.replaceWith(inner.textContent);
      for (const frame of this.frames) if (frame.mark.endsWith("[")) frame.dead = true; // links hold no links
      this.at = found.end;
      return;
    }
    if (k > 0 && k === this.frames.length - 1) this.collapse(k - 1);
    else if (k > 0) this.frames[k].dead = true;
    this.plain += "]";
    this.at += 1;
  }

  destination(from) {
    let depth = 0, end = from;
    for (; end < this.text.length && end - from < 2000; end += 1) {
      const char = this.text[end];
      if (isSpace(char)) break;
      if (char === "(") depth += 1;
      if (char === ")" && depth-- === 0) return { url: this.text.slice(from, end), end: end + 1 };
    }
    const title = /[ ]+"[^"\n]{0,300}"\)/y;
    title.lastIndex = end;
    return title.test(this.text) ? { url: this.text.slice(from, end), end: title.lastIndex } : null;
  }

  address() {
    const { text, at } = this;
    if (text[at] === "<") {
      const bracketed = /<(https?:\/\/[^\s<>]{1,2000})>/y;
      bracketed.lastIndex = at;
      const url = bracketed.exec(text)?.[1];
      const link = url && linkTo(url);
      if (!link) return false;
      this.push(fill(link, [url]));
      this.at += url.length + 2;
      return true;
    }
    const bare = /https?:\/\/[^\s<>"'`\\]{1,2000}/y;
    bare.lastIndex = at;
    let url = isWord(text[at - 1]) ? undefined : bare.exec(text)?.[0];
    while (url && (/[.,;:!?*_~\]]$/.test(url) || (url.endsWith(")") && !url.includes("(")))) url = url.slice(0, -1);
    const link = url && linkTo(url);
    if (!link) return false;
    this.push(fill(link, [url]));
    this.at += url.length;
    return true;
  }
}

const inline = (text) => new Inline(text).read();

/** A link for http and https, null for every other scheme and for what is no address. */
function linkTo(text) {
  let url;
  try { url = new URL(text); } catch { return null; }
  if (url.protocol !== "http:" && url.protocol !== "https:") return null;
  return h("a", { href: url.href, title: url.href, target: "_blank", rel: "noopener noreferrer nofollow" });
}

/** Shows a text that grows: blocks that are settled stay as they are, only the last one is made again. */
class Markdown {
  constructor(root, onSettled = () => {}) {
    this.root = root;
    this.onSettled = onSettled;
    this.settled = 0; // characters of the text
    this.kept = 0; // nodes of them
    this.grew = false;
  }

  grow(text) {
    this.grew = true;
    const lines = text.slice(this.settled).split("\n");
    const blocks = blocksOf(lines);
    while (this.root.childNodes.length > this.kept) this.root.lastChild.remove();
    for (const block of blocks) this.root.append(blockNode(block, 0));
    for (const block of blocks.slice(0, -1)) this.onSettled(this.root.childNodes[this.kept++].textContent, block);
    const last = blocks.at(-1);
    if (last && blocks.length > 1) for (const line of lines.slice(0, last.from)) this.settled += line.length + 1;
  }

  finish(text) { // as it would be after a reload, without touching what is so already
    const nodes = nodesOf(text.split("\n"), 0);
    if (this.grew) for (const node of nodes.slice(this.kept)) this.onSettled(node.textContent);
    this.grew = false;
    nodes.forEach((node, n) => {
      const old = this.root.childNodes[n];
      if (!old) this.root.append(node);
      else if (!old.isEqualNode(node)) old.replaceWith(node);
    });
    while (this.root.childNodes.length > nodes.length) this.root.lastChild.remove();
  }
}

/** JSON with line ends, every token as it was: 1e2 stays 1e2. */
function indented(json) {
  let out = "", depth = 0;
  const line = () => `\n${"  ".repeat(Math.max(0, depth))}`;
  for (const token of json.match(/"(?:[^"\\]|\\.)*"?|[{}[\],:]|[^\s"{}[\],:]+/gs) ?? []) {
    const last = out.at(-1);
    if (token === "{" || token === "[") { out += token; depth += 1; out += line(); }
    else if (token === "}" || token === "]") {
      depth -= 1;
      const opens = out.trimEnd();
      out = (opens.endsWith("{") || opens.endsWith("[")) && last !== '"' ? opens + token : out + line() + token;
    } else if (token === ",") out += token + line();
    else if (token === ":") out += ": ";
    else out += token;
  }
  return out;
}

// ---- conversations

const text = (value) => (typeof value === "string" ? value : "");
const list = (value) => (Array.isArray(value) ? value : []);
const object = (value) => (value !== null && typeof value === "object" && !Array.isArray(value) ? value : {});
const count = (value) => (Number.isFinite(value) && value >= 0 ? value : null);
const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");

function readSettings(value) {
  const from = object(value), effort = text(from.effort);
  return {
    effort: EFFORTS.includes(effort) ? effort : "max",
    system: text(from.system), tools: text(from.tools),
    temperature: text(from.temperature), topP: text(from.topP), maxTokens: text(from.maxTokens), seed: text(from.seed),
  };
}

/** What was kept, whatever it is: fields of a wrong kind become empty ones. */
function readConversation(kept) {
  let from;
  try { from = JSON.parse(kept); } catch { return null; }
  if (!text(object(from).id)) return null;
  return {
    id: from.id, title: text(from.title), updated: count(from.updated) ?? 0, settings: readSettings(from.settings),
    messages: list(from.messages).map(object).map(readMessage).filter(Boolean),
  };
}

function readMessage(from) {
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

const conversations = new Map();
const pictures = new Map(); // id: data URL, or null for one that is not kept any more
const runs = new Map(); // conversation id: the answer that is being written
const views = new Map(); // message: its view
const saving = new Map();
let defaults = readSettings(null);
let current = newConversation();
let models = [];
let model = null;
let pending = []; // pictures of the message box
let isPinned = true;

function newConversation() {
  return { id: newId(), title: "", updated: 0, settings: { ...defaults }, messages: [] };
}

function loadConversations() {
  for (const name of disk.names()) {
    const conversation = name.startsWith(CHAT) ? readConversation(disk.get(name)) : null;
    if (conversation && name === CHAT + conversation.id) conversations.set(conversation.id, conversation);
  }
}

/** Write a conversation; the oldest ones make room for it. */
function keep(conversation) {
  clearTimeout(saving.get(conversation.id));
  saving.delete(conversation.id);
  if (!conversation.messages.length) return;
  conversations.set(conversation.id, conversation);
  const own = JSON.stringify(conversation);
  const oldest = [...conversations.values()].filter((one) => one !== conversation && one !== current && !runs.has(one.id))
    .sort((a, b) => a.updated - b.updated);
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

function keepSoon(conversation) {
  const write = () => { saving.delete(conversation.id); if (conversations.has(conversation.id)) keep(conversation); };
  if (!saving.has(conversation.id)) saving.set(conversation.id, setTimeout(write, 1000));
}

function forget(conversation) {
  conversations.delete(conversation.id);
  disk.remove(CHAT + conversation.id);
}

// ---- pictures: too large for localStorage, so they are in IndexedDB; a conversation names them

let database = null;

function openPictures() {
  return new Promise((resolve) => {
    try {
      const request = indexedDB.open(`${PREFIX}pictures`, 1);
      request.onupgradeneeded = () => request.result.createObjectStore("pictures");
      request.onsuccess = () => { database = request.result; resolve(); };
      request.onerror = () => resolve();
    } catch { resolve(); }
  });
}

function inPictures(mode, work) {
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

async function pictureOf(id) {
  if (!pictures.has(id)) {
    const url = await inPictures("readonly", (store) => store.get(id));
    pictures.set(id, typeof url === "string" && url.startsWith("data:image/") ? url : null);
  }
  return pictures.get(id);
}

/** Delete what no conversation names. A conversation is written before its pictures, so none of another tab's go. */
async function sweepPictures() {
  const ids = list(await inPictures("readonly", (store) => store.getAllKeys()));
  const kept = disk.names().filter((name) => name.startsWith(CHAT)).map((name) => disk.get(name) ?? "");
  const open = [...conversations.values()].map((one) => JSON.stringify(one));
  for (const id of ids) {
    if (![...kept, ...open].some((one) => one.includes(id))) await inPictures("readwrite", (store) => store.delete(id));
  }
}

// ---- the server

class Failure extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

const keyOf = () => disk.get(`${PREFIX}key`, sessionStorage_()) ?? "";

async function ask(path, { body, signal, key = keyOf() } = {}) {
  const headers = { ...(body ? { "content-type": "application/json" } : {}), ...(key ? { authorization: `Bearer ${key}` } : {}) };
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
async function askWithKey(path, options = {}) {
  for (;;) {
    try {
      return await ask(path, options);
    } catch (error) {
      if (error.status !== 401) throw error;
      await askForKey(keyOf() ? "The server refused this key. Check it and try again." : "");
    }
  }
}

async function loadModels() {
  try {
    const found = object(await (await askWithKey("v1/models")).json());
    models = list(found.data).map(object).filter((one) => text(one.id));
    model = models.find((one) => one.id === model?.id) ?? models[0] ?? null;
    hideNotice();
  } catch (error) {
    notify(error.message, "Retry", loadModels);
  }
  showModel();
}

const sees = () => list(model?.input_modalities).includes("image");

/** Data of server-sent events, however the bytes were cut on the way. */
async function* eventsOf(stream) {
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

/** Tools as they are sent; bare functions are wrapped. Throws an Error for a person to read. */
function readTools(json) {
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
  maxTokens: ["max_tokens", "Most tokens", (x) => Number.isInteger(x) && x >= 1 && x <= 2 ** 31, "a whole number from 1"],
  seed: ["seed", "Seed", Number.isSafeInteger, "a whole number"],
};

function readNumbers(settings) {
  const fields = {};
  for (const [name, [field, label, isGood, expected]] of Object.entries(NUMBERS)) {
    if (!settings[name].trim()) continue;
    const value = Number(settings[name]);
    if (!isGood(value)) throw new Error(`${label}: must be ${expected}.`);
    fields[field] = value;
  }
  return fields;
}

const isWhole = (call) => { try { return call.name !== "" && object(JSON.parse(call.arguments)) !== null && call.arguments.trim().startsWith("{"); } catch { return false; } };

/** The messages as the API takes them. Earlier reasoning goes along: the model was trained so, and its tokens are cached. */
async function messagesOf(conversation) {
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
        ...(message.reasoning ? { reasoning_content: message.reasoning } : {}), ...(calls.length ? { tool_calls: calls } : {}),
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
    if (!url) throw new Failure(`The picture ${name || "of an earlier message"} is not kept any more; start a new chat.`);
    parts.push({ type: "image_url", image_url: { url } });
  }
  return message.text ? [...parts, { type: "text", text: message.text }] : parts;
}

async function bodyOf(conversation) {
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

// ---- answers

/** Ask for the next answer of a conversation, and write it down as it comes. */
async function answer(conversation) {
  if (runs.has(conversation.id)) return;
  if (!model) { await loadModels(); if (!model) return; }
  const message = readMessage({ role: "assistant", model: model.id });
  const run = { conversation, message, controller: new AbortController(), began: performance.now(), pieces: 0, firstAt: 0, firstCount: 0, lastAt: 0, thinkingAt: 0 };
  const body = await bodyOf(conversation).catch((error) => { message.error = error.message; return null; });
  message.finish = body ? "" : "error";
  conversation.messages.push(message);
  conversation.updated = Date.now();
  if (body) runs.set(conversation.id, run);
  keep(conversation);
  showConversations();
  showMessage(conversation, message);
  showBusy();
  if (!body) return;
  announce("The model is asked.");
  const ticking = setInterval(() => paintSoon(run), 250);
  try {
    await receive(run, body);
  } catch (error) {
    const isCut = !(error instanceof Failure) && !run.controller.signal.aborted;
    if (isCut) await new Promise((resolve) => setTimeout(resolve, 300)); // or does the page go away?
    if (run.controller.signal.aborted) message.finish = "stopped";
    else {
      message.finish = "error";
      message.error = error instanceof Failure ? error.message : "The connection broke off before the answer had ended.";
    }
  }
  clearInterval(ticking);
  if (runs.get(conversation.id) === run) runs.delete(conversation.id);
  closeThinking(run);
  if (conversations.get(conversation.id) === conversation) keep(conversation); // or it was deleted meanwhile
  showConversations();
  if (conversation !== current || !conversation.messages.includes(message)) return;
  views.get(message)?.finish();
  follow();
  showBusy();
  settle(message);
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
    paintSoon(run);
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
    while (message.calls.length <= index && message.calls.length < 1000) message.calls.push({ id: "", name: "", arguments: "", draft: "" });
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

function stop(conversation) {
  runs.get(conversation.id)?.controller.abort();
}

/** Screen readers are told the end; whoever waits at the empty message box is led to the field of a tool's result. */
function settle(message) {
  const field = views.get(message)?.root.querySelector(".result textarea");
  if (message.error) announce(`Error: ${message.error}`);
  else announce(field ? `The model calls ${message.calls[0].name}. Type the result.` : message.finish === "stopped" ? "Stopped." : "The answer has ended.");
  const focused = document.activeElement;
  if (field && (focused === document.body || (focused === $.input && !$.input.value))) field.focus();
}

/** Put another end to a conversation and ask again. Later turns that get lost can be brought back. */
function replaceFrom(index, added = []) {
  const conversation = current, before = conversation.messages.slice();
  stop(conversation);
  runs.delete(conversation.id);
  conversation.messages = [...before.slice(0, index), ...added];
  isPinned = true;
  showAll();
  answer(conversation);
  if (before.slice(index + 1).some((message) => message.role === "user")) {
    notify("Later messages were removed.", "Undo", () => {
      stop(conversation);
      runs.delete(conversation.id);
      conversation.messages = before;
      keep(conversation);
      if (conversation === current) showAll();
      hideNotice();
    });
  }
}

// ---- views of messages

function secondsText(seconds) {
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
}

const tokensText = (n) => `${n.toLocaleString("en")} ${n === 1 ? "token" : "tokens"}`;

function statsText(message) {
  const { usage, times } = message;
  const parts = [];
  if (usage.answer !== null) parts.push(tokensText(usage.answer));
  if (times.rate) parts.push(`${times.rate.toFixed(times.rate < 100 ? 1 : 0)} tokens/s`);
  if (times.first !== null) parts.push(`first after ${secondsText(times.first)}`);
  if (usage.prompt !== null) parts.push(`prompt ${usage.prompt.toLocaleString("en")}${usage.cached ? ` (${usage.cached.toLocaleString("en")} cached)` : ""}`);
  return parts.join(" · ");
}

class UserView {
  constructor(message) {
    this.message = message;
    this.root = h("article", { class: "message user", "aria-label": "You" });
    this.show();
  }

  show() {
    const { message } = this;
    this.root.replaceChildren();
    if (message.pictures.length) {
      this.root.append(fill(h("ul", { class: "pictures" }), message.pictures.map((one) => h("li", {}, this.picture(one)))));
    }
    if (message.text) this.root.append(h("div", { class: "bubble" }, message.text));
    this.root.append(h("div", { class: "tools-row" }, copyButton(() => message.text, "Copy the message"), iconButton("pencil", "Edit the message", () => this.edit())));
  }

  picture({ id, name }) {
    const label = name || "Picture";
    const image = h("img", { alt: label });
    const button = h("button", { type: "button", "aria-label": `Enlarge ${label}`, onclick: () => enlarge(image.src, label) }, image);
    pictureOf(id).then((url) => {
      if (url) { image.addEventListener("load", follow, { once: true }); image.src = url; }
      else button.replaceWith(h("span", { class: "gone" }, `${label} is not kept any more`));
    });
    return button;
  }

  edit() {
    const area = h("textarea", { rows: "1", "aria-label": "Edit the message" });
    area.value = this.message.text;
    const back = () => { this.show(); $.input.focus(); };
    const send = () => {
      const index = current.messages.indexOf(this.message);
      if (index < 0 || (!area.value.trim() && !this.message.pictures.length)) return;
      if (!settingsAreGood()) return;
      replaceFrom(index, [{ ...this.message, text: area.value }]);
      $.input.focus();
    };
    area.addEventListener("input", () => grow(area));
    area.addEventListener("keydown", (event) => {
      if (isEnter(event)) { event.preventDefault(); send(); }
      if (event.key === "Escape") { event.preventDefault(); event.stopPropagation(); back(); }
    });
    this.root.replaceChildren(h("div", { class: "edit" }, area, h("div", { class: "actions" },
      h("button", { class: "plain", type: "button", onclick: back }, "Cancel"),
      h("button", { class: "primary", type: "button", onclick: send }, "Send"))));
    grow(area);
    area.focus();
  }
}

class AssistantView {
  constructor(message, conversation) {
    this.message = message;
    this.conversation = conversation;
    this.wasToggled = false;
    this.cards = [];
    this.waiting = h("div", { class: "waiting", role: "img", "aria-label": "Waiting for the model" }, h("b"), h("b"), h("b"));
    this.answer = h("div", { class: "answer" });
    this.calls = h("div", { class: "calls", hidden: true });
    this.end = h("div");
    this.makeThinking();
    this.root = h("article", { class: "message assistant", "aria-label": "Answer" }, this.thinking, this.answer, this.calls, this.waiting, this.end);
    this.markdown = new Markdown(this.answer, (settled) => announce(settled));
    if (this.isLive) this.update();
    else this.finish();
  }

  get isLive() { return this.message.finish === "" || runs.get(this.conversation.id)?.message === this.message; }

  makeThinking() {
    this.word = h("span", { class: "word" });
    this.amount = h("span");
    this.thoughts = document.createTextNode("");
    this.box = h("div", { class: "thoughts", tabindex: "0", role: "group", "aria-label": "Thoughts" }, this.thoughts);
    const summary = h("summary", { onclick: () => { this.wasToggled = true; } }, icon("chevron"), this.word, this.amount);
    this.thinking = h("details", { class: "thinking", hidden: true }, summary, this.box);
  }

  update() {
    const { message } = this;
    this.waiting.hidden = Boolean(message.reasoning || message.content || message.calls.length) || !this.isLive;
    this.showThinking();
    if (message.content !== this.shown && this.isLive) { this.markdown.grow(message.content); this.shown = message.content; }
    if (message.calls.length) this.showCalls();
  }

  showThinking() {
    const { message } = this, { reasoning, usage, times } = message;
    this.thinking.hidden = !reasoning;
    if (!reasoning) return;
    const isThinking = this.isLive && !message.content && !message.calls.length;
    const run = runs.get(this.conversation.id);
    const seconds = isThinking && run?.thinkingAt ? (performance.now() - run.thinkingAt) / 1000 : times.thinking;
    this.word.textContent = isThinking ? "Thinking" : "Thought";
    const parts = [seconds === null ? "" : `${isThinking ? "" : "for "}${secondsText(seconds)}`, usage.reasoning === null ? "" : tokensText(usage.reasoning)];
    this.amount.textContent = parts.filter(Boolean).join(" · ");
    this.thinking.toggleAttribute("data-live", isThinking);
    if (!this.wasToggled && this.thinking.open !== isThinking) this.thinking.open = isThinking;
    const isAtEnd = this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 40;
    if (reasoning.length !== this.thoughts.length) this.thoughts.appendData(reasoning.slice(this.thoughts.length));
    if (isThinking && isAtEnd) this.box.scrollTop = this.box.scrollHeight;
  }

  showCalls() {
    this.calls.hidden = false;
    this.message.calls.forEach((call, n) => {
      if (!this.cards[n]) {
        this.cards[n] = new CallCard(call, this);
        this.calls.append(this.cards[n].root);
      }
      this.cards[n].update();
    });
  }

  /** The answer has ended: all of it, its figures, and what can be done with it. */
  finish() {
    const { message } = this;
    this.update();
    this.markdown.finish(message.content);
    this.showResults();
    const row = h("div", { class: "tools-row" },
      message.content ? copyButton(() => message.content, "Copy the answer") : null,
      message.error ? null : iconButton("again", "Answer again", () => this.again()),
      h("span", { class: "stats" }, statsText(message)));
    const ended = { stopped: "Stopped.", length: "The answer reached its limit of tokens." }[message.finish];
    const fault = message.error && h("div", { class: "fault", role: "alert" }, h("span", {}, message.error),
      h("button", { type: "button", onclick: () => this.again() }, "Retry"));
    this.end.replaceChildren(...[ended && h("p", { class: "ended" }, ended), fault || null, row].filter(Boolean));
  }

  again() {
    const index = current.messages.indexOf(this.message);
    if (index < 0 || !settingsAreGood()) return;
    replaceFrom(index);
    $.input.focus();
  }

  /** Fields for results while the model waits for them; afterwards the results. */
  showResults() {
    const { messages } = this.conversation, index = messages.indexOf(this.message);
    const calls = this.message.calls.filter(isWhole);
    const later = messages.slice(index + 1);
    const isWaiting = calls.length > 0 && later.length === 0;
    for (const card of this.cards) {
      const result = later.find((one) => one.role === "tool" && one.call === card.call.id);
      card.showResult(isWaiting && isWhole(card.call), result);
    }
    this.submit?.remove();
    if (!isWaiting) return;
    const button = h("button", { class: "primary", type: "button", onclick: () => this.sendResults() }, calls.length > 1 ? "Send the results" : "Send the result");
    this.submit = h("div", { class: "actions" }, h("span", { class: "note" }, "Ctrl Enter"), button);
    this.calls.append(this.submit);
  }

  sendResults() {
    const index = this.conversation.messages.indexOf(this.message);
    if (index !== this.conversation.messages.length - 1 || !settingsAreGood()) return;
    for (const call of this.message.calls.filter(isWhole)) {
      this.conversation.messages.push({ role: "tool", call: call.id, content: call.draft });
      call.draft = "";
    }
    this.showResults();
    isPinned = true;
    answer(this.conversation);
    $.input.focus();
  }
}

class CallCard {
  constructor(call, view) {
    this.call = call;
    this.view = view;
    this.name = h("span", { class: "name" });
    this.state = h("span", { class: "state" });
    this.arguments = h("pre", { tabindex: "0", "aria-label": "Arguments" });
    this.result = h("div", { class: "result", hidden: true });
    const bar = h("div", { class: "bar" }, h("i", {}, icon("tool")), this.name, this.state, copyButton(() => call.arguments, "Copy the arguments"));
    this.root = h("section", { class: "call" }, bar, this.arguments, this.result);
  }

  update() {
    const { call } = this;
    this.name.textContent = call.name;
    this.root.setAttribute("aria-label", `Call of ${call.name}`);
    if (this.shown !== call.arguments) this.arguments.textContent = indented(call.arguments);
    this.shown = call.arguments;
    if (this.view.isLive) this.state.textContent = "writing";
  }

  showResult(isWaiting, result) {
    const isCut = !isWhole(this.call);
    this.state.textContent = isCut ? "cut off" : result ? "answered" : isWaiting ? "waits for a result" : "no result";
    this.state.classList.toggle("done", Boolean(result));
    this.result.hidden = !result && !isWaiting;
    if (result) {
      this.result.replaceChildren(h("span", { class: "caption" }, "Result"), h("pre", { tabindex: "0", "aria-label": "Result" }, result.content));
    } else if (isWaiting) this.result.replaceChildren(...this.field());
  }

  field() {
    const id = `result-${newId()}`, { calls } = this.view.message;
    const number = calls.length > 1 ? `, call ${calls.indexOf(this.call) + 1} of ${calls.length}` : "";
    const area = h("textarea", { id, rows: "2", spellcheck: "false" });
    area.value = this.call.draft;
    area.addEventListener("input", () => { this.call.draft = area.value; keepSoon(this.view.conversation); });
    area.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); this.view.sendResults(); }
    });
    return [h("label", { for: id }, `Result of ${this.call.name}${number}`), area];
  }
}

// ---- the page

const $ = {};

function announce(said) {
  $.status.append(h("p", {}, said));
  while ($.status.childElementCount > 12) $.status.firstElementChild.remove();
}

function notify(said, action, onaction) {
  $.notice.replaceChildren(h("span", {}, said),
    ...(action ? [h("button", { class: "plain", type: "button", onclick: onaction }, action)] : []),
    iconButton("close", "Dismiss", hideNotice));
  $.notice.hidden = false;
}

function hideNotice() {
  $.notice.hidden = true;
}

function paintSoon(run) {
  if (run.isWaiting) return;
  run.isWaiting = true;
  requestAnimationFrame(() => {
    run.isWaiting = false;
    if (run.conversation !== current || !runs.has(run.conversation.id)) return;
    views.get(run.message)?.update();
    follow();
  });
}

function follow() {
  if (isPinned) $.scroller.scrollTop = $.scroller.scrollHeight;
  showToEnd();
}

function showToEnd() {
  $["to-end"].hidden = isPinned || $.messages.childElementCount === 0;
}

function showMessage(conversation, message) {
  if (conversation !== current) return;
  const view = message.role === "user" ? new UserView(message) : new AssistantView(message, conversation);
  views.set(message, view);
  $.messages.append(view.root);
  $.empty.hidden = true;
  $.export.disabled = false;
  follow();
}

function showAll() {
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

function showTitle() {
  $.title.textContent = current.title || "New chat";
  document.title = current.title ? `${current.title} - openk3` : "openk3";
}

function showBusy() {
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

function showConversations() {
  const sorted = [...conversations.values()].sort((a, b) => b.updated - a.updated);
  const focused = document.activeElement?.closest?.("#conversations li")?.dataset.id;
  $.conversations.replaceChildren(...sorted.map((one) => {
    const title = one.title || "Pictures";
    const open = h("button", { class: "open", type: "button", title, "aria-current": one === current ? "true" : null, onclick: () => openConversation(one) }, title);
    return h("li", { "data-id": one.id, "data-current": one === current, "data-busy": runs.has(one.id) }, open, iconButton("trash", `Delete ${title}`, () => deleteConversation(one)));
  }));
  if (focused) $.conversations.querySelector(`li[data-id="${CSS.escape(focused)}"] .open`)?.focus();
}

function openConversation(conversation) {
  current = conversation;
  disk.set(`${PREFIX}open`, current.id, sessionStorage_());
  isPinned = true;
  showSidebar(false);
  showAll();
  showConversations();
  $.input.focus();
}

function newChat() {
  for (const dialog of document.querySelectorAll("dialog[open]")) dialog.close();
  openConversation(newConversation());
}

function deleteConversation(conversation) {
  const wasCurrent = conversation === current;
  stop(conversation);
  forget(conversation);
  clearTimeout(saving.get(conversation.id));
  saving.delete(conversation.id);
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

function showModel() {
  $.model.replaceChildren();
  if (models.length > 1) {
    const select = h("select", { "aria-label": "Model", onchange: () => { model = models[select.selectedIndex]; showModel(); } },
      ...models.map((one) => h("option", { selected: one === model }, one.id)));
    $.model.append(select);
  } else $.model.textContent = model?.id ?? "";
  $.model.title = model ? model.id : "";
  const length = count(model?.max_model_len);
  $.about.textContent = !model ? "" : [`${model.id} answers here`, length && `${tokensText(length)} of context`, sees() && "sees pictures"].filter(Boolean).join(" · ");
  $.attach.hidden = !sees();
  const efforts = list(model?.reasoning_efforts);
  for (const radio of $.effort.elements) if (efforts.length && radio.value !== "off") radio.parentElement.hidden = !efforts.includes(radio.value);
  $["forget-key"].hidden = !keyOf();
}

function grow(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight}px`;
}

const isEnter = (event) => event.key === "Enter" && !event.shiftKey && !event.ctrlKey && !event.metaKey && !event.isComposing && event.keyCode !== 229;

function send() {
  const typed = $.input.value;
  if ((!typed.trim() && !pending.length) || runs.has(current.id) || !settingsAreGood()) return;
  if (pending.length && !sees()) { notify(`${model?.id ?? "This model"} cannot see pictures.`); return; }
  const message = { role: "user", text: typed, pictures: pending.map(({ id, name }) => ({ id, name })) };
  disk.set(`${PREFIX}open`, current.id, sessionStorage_());
  if (!current.title) current.title = typed.trim().split("\n")[0].slice(0, 80);
  const last = current.messages.at(-1);
  current.messages.push(message);
  keep(current); // before its pictures, see sweepPictures
  for (const { id, url } of pending) {
    inPictures("readwrite", (store) => store.put(url, id)).then((done) => {
      if (done === null) notify("This browser does not keep the pictures; after a reload they are gone.");
    });
  }
  pending = [];
  $.input.value = "";
  disk.remove(`${PREFIX}draft`, sessionStorage_());
  grow($.input);
  showPreviews();
  hideNotice();
  isPinned = true;
  views.get(last)?.showResults?.();
  showTitle();
  showMessage(current, message);
  answer(current);
}

// ---- pictures of the message box

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

function enlarge(url, label) {
  $["picture-image"].src = url;
  $["picture-image"].alt = label;
  $.picture.showModal();
}

// ---- settings and the key

const FIELDS = { system: "system", tools: "tools", temperature: "temperature", topP: "top-p", maxTokens: "max-tokens", seed: "seed" };

function showSettings() {
  for (const [name, id] of Object.entries(FIELDS)) $[id].value = current.settings[name];
  for (const radio of $.effort.elements) if (radio.name === "effort") radio.checked = radio.value === current.settings.effort;
  $.scheme.value = disk.get(`${PREFIX}scheme`) ?? "system";
  checkSettings();
}

/** Marks what is wrong and shows what is in use; whether all is good. */
function checkSettings() {
  let tools = [], problem = "", numbers = "";
  try { tools = readTools(current.settings.tools); } catch (error) { problem = error.message; }
  try { readNumbers(current.settings); } catch (error) { numbers = error.message; }
  for (const [id, said] of [["tools-error", problem], ["numbers-error", numbers]]) {
    $[id].textContent = said;
    $[id].hidden = !said;
  }
  $.tools.setAttribute("aria-invalid", String(Boolean(problem)));
  const used = [current.settings.system.trim() && "system prompt", tools.length && (tools.length === 1 ? "1 tool" : `${tools.length} tools`)].filter(Boolean);
  $.chips.textContent = used.join(", ");
  $.chips.setAttribute("aria-label", `In use: ${used.join(", ")}. Settings`);
  $.chips.hidden = !used.length;
  return !problem && !numbers;
}

function settingsAreGood() {
  if (checkSettings()) return true;
  $.settings.showModal();
  ($.tools.getAttribute("aria-invalid") === "true" ? $.tools : $.temperature).focus();
  return false;
}

function changeSettings() {
  for (const [name, id] of Object.entries(FIELDS)) current.settings[name] = $[id].validity.badInput ? "?" : $[id].value;
  current.settings.effort = $.effort.querySelector("input:checked")?.value ?? "max";
  defaults = { ...current.settings };
  disk.set(`${PREFIX}settings`, JSON.stringify(defaults));
  keepSoon(current);
  checkSettings();
}

const EXAMPLE = `[
  {
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
      "type": "object",
      "properties": {"city": {"type": "string"}},
      "required": ["city"]
    }
  }
]`;

function setScheme(scheme) {
  if (scheme === "system") disk.remove(`${PREFIX}scheme`);
  else disk.set(`${PREFIX}scheme`, scheme);
  applyScheme();
  showScheme();
}

const isDark = () => (document.documentElement.dataset.scheme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

function showScheme() {
  $.theme.setAttribute("aria-pressed", String(isDark()));
  $.scheme.value = disk.get(`${PREFIX}scheme`) ?? "system";
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
        disk.set(`${PREFIX}key`, key, sessionStorage_());
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

async function exportConversation() {
  const { title, settings } = current;
  const answers = current.messages.filter((one) => one.role === "assistant");
  const data = {
    format: "openk3 conversation", version: 1, exported: new Date().toISOString(), title, model: model?.id ?? null, settings,
    messages: await messagesOf(current).catch((error) => { notify(error.message); return null; }),
    answers: answers.map(({ model: name, finish, error, usage, times }) => ({ model: name, finish, error, usage, times })),
  };
  if (!data.messages) return;
  const url = URL.createObjectURL(new Blob([JSON.stringify(data, null, 2)], { type: "application/json" }));
  const name = title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40) || "conversation";
  h("a", { href: url, download: `${name}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60000);
}

function showSidebar(isOpen) {
  $.sidebar.toggleAttribute("data-open", isOpen);
  $.veil.hidden = !isOpen;
  $["open-sidebar"].setAttribute("aria-expanded", String(isOpen));
  if (isOpen) $["new-chat"].focus();
}

// ---- events

function listen() {
  $.composer.addEventListener("submit", (event) => { event.preventDefault(); send(); });
  $.input.addEventListener("input", () => { grow($.input); showSend(); disk.set(`${PREFIX}draft`, $.input.value, sessionStorage_()); });
  $.input.addEventListener("keydown", (event) => { if (isEnter(event)) { event.preventDefault(); send(); } });
  $.stop.addEventListener("click", () => stop(current));
  $["new-chat"].addEventListener("click", newChat);
  $["to-end"].addEventListener("click", () => { isPinned = true; follow(); });
  let before = 0;
  $.scroller.addEventListener("scroll", () => { // what grows below does not end the following, only who scrolls up does
    const { scrollTop, scrollHeight, clientHeight } = $.scroller;
    if (scrollHeight - scrollTop - clientHeight < 60) isPinned = true;
    else if (scrollTop < before) isPinned = false;
    before = scrollTop;
    showToEnd();
  }, { passive: true });
  const resizing = new ResizeObserver(follow); // pictures that load, fonts, keyboards of phones
  for (const node of [$.scroller, $.messages]) resizing.observe(node);
  $.export.addEventListener("click", exportConversation);
  $.theme.addEventListener("click", () => setScheme(isDark() ? "light" : "dark"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showScheme);
  $["open-sidebar"].addEventListener("click", () => showSidebar(true));
  for (const id of ["close-sidebar", "veil"]) $[id].addEventListener("click", () => { showSidebar(false); $["open-sidebar"].focus(); });
  document.addEventListener("keydown", onKey);
  listenToPictures();
  listenToSettings();
  addEventListener("pagehide", () => { for (const { conversation } of runs.values()) keep(conversation); for (const id of saving.keys()) if (conversations.has(id)) keep(conversations.get(id)); });
  addEventListener("storage", onOtherTab);
}

function onKey(event) {
  if ((event.ctrlKey || event.metaKey) && !event.shiftKey && !event.altKey && event.key.toLowerCase() === "k") {
    event.preventDefault();
    newChat();
  }
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if ($.sidebar.hasAttribute("data-open")) { showSidebar(false); $["open-sidebar"].focus(); }
  else if (runs.has(current.id)) stop(current);
  else hideNotice();
}

function listenToPictures() {
  $.attach.addEventListener("click", () => $.files.click());
  $.files.addEventListener("change", () => { const chosen = [...$.files.files]; $.files.value = ""; addPictures(chosen); });
  const hasFiles = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  let depth = 0; // enter and leave come for every element below
  document.addEventListener("dragenter", (event) => { if (hasFiles(event)) { depth += 1; $.drop.hidden = !sees(); } });
  document.addEventListener("dragleave", (event) => { if (hasFiles(event)) { depth = Math.max(0, depth - 1); $.drop.hidden ||= depth === 0; } });
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

function listenToSettings() {
  const open = () => { showSettings(); $.settings.showModal(); };
  $["open-settings"].addEventListener("click", open);
  $.chips.addEventListener("click", open);
  for (const id of Object.values(FIELDS)) $[id].addEventListener("input", changeSettings);
  $.effort.addEventListener("change", changeSettings);
  $["tools-example"].addEventListener("click", () => { $.tools.value = EXAMPLE; changeSettings(); $.tools.focus(); $.tools.setSelectionRange(0, 0); $.tools.scrollTop = 0; });
  $.scheme.addEventListener("change", () => setScheme($.scheme.value));
  $["delete-all"].addEventListener("click", deleteAll);
  $["forget-key"].addEventListener("click", () => { disk.remove(`${PREFIX}key`, sessionStorage_()); $.settings.close(); showModel(); loadModels(); });
  for (const dialog of [$.settings, $.picture]) dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
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
    current = conversation || newConversation();
    showAll();
  }
  showConversations();
}

async function start() {
  for (const node of document.querySelectorAll("[id]")) $[node.id] = node;
  for (const node of document.querySelectorAll("[data-icon]")) node.append(icon(node.dataset.icon));
  try { defaults = readSettings(JSON.parse(disk.get(`${PREFIX}settings`))); } catch { /* as at first */ }
  loadConversations();
  current = newConversation();
  const last = conversations.get(disk.get(`${PREFIX}open`, sessionStorage_()));
  if (last) current = last;
  listen();
  $.input.value = disk.get(`${PREFIX}draft`, sessionStorage_()) ?? "";
  await openPictures();
  showAll();
  showConversations();
  showScheme();
  grow($.input);
  showSend();
  $.input.focus();
  await loadModels();
  sweepPictures();
}

addEventListener("DOMContentLoaded", start);
})();
