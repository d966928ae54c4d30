// The card of one call of a tool: its arguments, and the field for its result.

import { keepSoon } from "./conversations.js";
import { h, icon } from "./nodes.js";
import { copyButton } from "./notices.js";
import { isWhole } from "./request.js";
import { newId } from "./values.js";

export class CallCard {
  constructor(call, view) {
    this.call = call;
    this.view = view;
    this.name = h("span", { class: "name" });
    this.state = h("span", { class: "state" });
    this.arguments = h("pre", { tabindex: "0", "aria-label": "Arguments" });
    this.result = h("div", { class: "result", hidden: true });
    const bar = h("div", { class: "bar" }, h("i", {}, icon("tool")), this.name, this.state,
      copyButton(() => call.arguments, "Copy the arguments"));
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
      this.result.replaceChildren(h("span", { class: "caption" }, "Result"),
        h("pre", { tabindex: "0", "aria-label": "Result" }, result.content));
    } else if (isWaiting) this.result.replaceChildren(...this.field());
  }

  field() {
    const id = `result-${newId()}`, { calls } = this.view.message;
    const number = calls.length > 1 ? `, call ${calls.indexOf(this.call) + 1} of ${calls.length}` : "";
    const area = h("textarea", { id, rows: "2", spellcheck: "false" });
    area.value = this.call.draft;
    area.addEventListener("input", () => { this.call.draft = area.value; keepSoon(this.view.conversation); });
    area.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
      event.preventDefault();
      this.view.sendResults();
    });
    return [h("label", { for: id }, `Result of ${this.call.name}${number}`), area];
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
