// The end of the conversation stays in sight, unless somebody scrolls away from it.

import { $ } from "./nodes.js";

let isPinned = true;

export function pin() {
  isPinned = true;
}

export function follow() {
  if (isPinned) $.scroller.scrollTop = $.scroller.scrollHeight;
  showToEnd();
}

function showToEnd() {
  $["to-end"].hidden = isPinned || $.messages.childElementCount === 0;
}

export function listenToScrolling() {
  $["to-end"].addEventListener("click", () => { pin(); follow(); });
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
}
