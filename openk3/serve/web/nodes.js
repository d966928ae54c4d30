// The page's elements by id, and new ones made of a tag, attributes and children: text is never read as HTML.

/** What the page names; modules run when it has been read. */
export const $ = Object.fromEntries(Array.from(document.querySelectorAll("[id]"), (node) => [node.id, node]));

export function h(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  return fill(node, children);
}

export function fill(node, children) {
  for (const child of children) if (child !== null && child !== undefined && child !== false) node.append(child);
  return node;
}

export function icon(name) {
  return document.getElementById(`icon-${name}`).content.firstElementChild.cloneNode(true);
}

export function iconButton(name, label, onclick) {
  const props = { class: "icon small", type: "button", "aria-label": label, title: label, onclick };
  return h("button", props, icon(name));
}

export function grow(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight}px`;
}

/** Enter alone, and not the one that ends the composing of a character. */
export function isEnter(event) {
  const isPlain = !event.shiftKey && !event.ctrlKey && !event.metaKey;
  return event.key === "Enter" && isPlain && !event.isComposing && event.keyCode !== 229;
}
