// What the page says beside the conversation: to screen readers, above the message box, on copying.

import { $, h, icon, iconButton } from "./nodes.js";

export function announce(said) {
  $.status.append(h("p", {}, said));
  while ($.status.childElementCount > 12) $.status.firstElementChild.remove();
}

export function notify(said, action, onaction) {
  $.notice.replaceChildren(h("span", {}, said),
    ...(action ? [h("button", { class: "plain", type: "button", onclick: onaction }, action)] : []),
    iconButton("close", "Dismiss", hideNotice));
  $.notice.hidden = false;
}

export function hideNotice() {
  $.notice.hidden = true;
}

export function copyButton(text, label = "Copy") {
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
