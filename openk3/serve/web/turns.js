// What a message looks like: the user's bubble, the model's thoughts, answer and calls.

import { answer, replaceFrom } from "./answers.js";
import { CallCard } from "./call_card.js";
import { current, runs } from "./conversations.js";
import { Markdown } from "./markdown.js";
import { $, grow, h, icon, iconButton, isEnter } from "./nodes.js";
import { announce, copyButton } from "./notices.js";
import { pictureOf } from "./pictures.js";
import { isWhole } from "./request.js";
import { follow, pin } from "./scrolling.js";
import { settingsAreGood } from "./settings.js";
import { secondsText, tokensText } from "./values.js";

function statsText(message) {
  const { usage, times } = message;
  const parts = [];
  if (usage.answer !== null) parts.push(tokensText(usage.answer));
  if (times.rate) parts.push(`${times.rate.toFixed(times.rate < 100 ? 1 : 0)} tokens/s`);
  if (times.first !== null) parts.push(`first after ${secondsText(times.first)}`);
  const cached = usage.cached ? ` (${usage.cached.toLocaleString("en")} cached)` : "";
  if (usage.prompt !== null) parts.push(`prompt ${usage.prompt.toLocaleString("en")}${cached}`);
  return parts.join(" · ");
}

export class UserView {
  constructor(message) {
    this.message = message;
    this.root = h("article", { class: "message user", "aria-label": "You" });
    this.show();
  }

  show() {
    const { message } = this;
    this.root.replaceChildren();
    if (message.pictures.length) {
      const items = message.pictures.map((one) => h("li", {}, this.picture(one)));
      this.root.append(h("ul", { class: "pictures" }, ...items));
    }
    if (message.text) this.root.append(h("div", { class: "bubble" }, message.text));
    this.root.append(h("div", { class: "tools-row" }, copyButton(() => message.text, "Copy the message"),
      iconButton("pencil", "Edit the message", () => this.edit())));
  }

  picture({ id, name }) {
    const label = name || "Picture";
    const image = h("img", { alt: label });
    const onclick = () => enlarge(image.src, label);
    const button = h("button", { type: "button", "aria-label": `Enlarge ${label}`, onclick }, image);
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

function enlarge(url, label) {
  $["picture-image"].src = url;
  $["picture-image"].alt = label;
  $.picture.showModal();
}

export class AssistantView {
  constructor(message, conversation) {
    this.message = message;
    this.conversation = conversation;
    this.wasToggled = false;
    this.cards = [];
    this.waiting = h("div", { class: "waiting", role: "img", "aria-label": "Waiting for the model" },
      h("b"), h("b"), h("b"));
    this.answer = h("div", { class: "answer" });
    this.calls = h("div", { class: "calls", hidden: true });
    this.end = h("div");
    this.makeThinking();
    this.root = h("article", { class: "message assistant", "aria-label": "Answer" },
      this.thinking, this.answer, this.calls, this.waiting, this.end);
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
    const onclick = () => { this.wasToggled = true; };
    const summary = h("summary", { onclick }, icon("chevron"), this.word, this.amount);
    this.thinking = h("details", { class: "thinking", hidden: true }, summary, this.box);
  }

  update() {
    const { message } = this;
    this.waiting.hidden = Boolean(message.reasoning || message.content || message.calls.length) || !this.isLive;
    this.showThinking();
    if (message.content !== this.shown && this.isLive) {
      this.markdown.grow(message.content);
      this.shown = message.content;
    }
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
    const time = seconds === null ? "" : `${isThinking ? "" : "for "}${secondsText(seconds)}`;
    const tokens = usage.reasoning === null ? "" : tokensText(usage.reasoning);
    this.amount.textContent = [time, tokens].filter(Boolean).join(" · ");
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
    const label = calls.length > 1 ? "Send the results" : "Send the result", onclick = () => this.sendResults();
    this.submit = h("div", { class: "actions" }, h("span", { class: "note" }, "Ctrl Enter"),
      h("button", { class: "primary", type: "button", onclick }, label));
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
    pin();
    answer(this.conversation);
    $.input.focus();
  }
}
