// Markdown's lines as blocks: headings, lists, quotes, tables, code and paragraphs.

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

export function cellsOf(line) {
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
export function blocksOf(lines) {
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
