// One paragraph of Markdown as nodes: emphasis, code, links.

import { fill, h } from "./nodes.js";

const MOST_FRAMES = 24; // of emphasis and brackets
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

export const inline = (text) => new Inline(text).read();

/** A link for http and https, null for every other scheme and for what is no address. */
function linkTo(text) {
  let url;
  try { url = new URL(text); } catch { return null; }
  if (url.protocol !== "http:" && url.protocol !== "https:") return null;
  return h("a", { href: url.href, title: url.href, target: "_blank", rel: "noopener noreferrer nofollow" });
}
