// A small part of Markdown, made of nodes, also while the text grows.

import { blocksOf, cellsOf } from "./blocks.js";
import { inline } from "./inline.js";
import { fill, h } from "./nodes.js";
import { copyButton } from "./notices.js";

const MOST_DEPTH = 8; // of lists and quotes

function blockNode(block, depth) {
  switch (block.kind) {
    case "code": return codeNode(block);
    case "heading": return fill(h(`h${Math.min(6, block.level + 2)}`), inline(block.text));
    case "rule": return h("hr");
    case "table": return tableNode(block.lines);
    case "quote":
      if (depth >= MOST_DEPTH) return h("p", {}, block.lines.join("\n"));
      return fill(h("blockquote"), nodesOf(block.lines, depth + 1));
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
  const alignOf = (cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : null);
  const aligns = cellsOf(lines[1]).map(alignOf);
  const row = (line, tag) => {
    const cells = cellsOf(line);
    return fill(h("tr"), aligns.map((align, n) => fill(h(tag, { "data-align": align }), inline(cells[n] ?? ""))));
  };
  return h("div", { class: "table", tabindex: "0", role: "group", "aria-label": "Table" },
    h("table", {}, h("thead", {}, row(lines[0], "th")),
      fill(h("tbody"), lines.slice(2).map((line) => row(line, "td")))));
}

/** Shows a text that grows: blocks that are settled stay as they are, only the last one is made again. */
export class Markdown {
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
