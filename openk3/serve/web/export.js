// A conversation as a file, with messages that the API takes again.

import { current } from "./conversations.js";
import { model } from "./models.js";
import { h } from "./nodes.js";
import { notify } from "./notices.js";
import { messagesOf } from "./request.js";

export async function exportConversation() {
  const { title, settings } = current;
  const answers = current.messages.filter((one) => one.role === "assistant");
  const data = {
    format: "openk3 conversation", version: 1, exported: new Date().toISOString(),
    title, model: model?.id ?? null, settings,
    messages: await messagesOf(current).catch((error) => { notify(error.message); return null; }),
    answers: answers.map((one) => (
      { model: one.model, finish: one.finish, error: one.error, usage: one.usage, times: one.times })),
  };
  if (!data.messages) return;
  const url = URL.createObjectURL(new Blob([JSON.stringify(data, null, 2)], { type: "application/json" }));
  const words = title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "");
  const name = words.slice(0, 40) || "conversation";
  h("a", { href: url, download: `${name}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60000);
}
