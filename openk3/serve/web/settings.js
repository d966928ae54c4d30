// The settings of a conversation and of the page, checked as they are typed.

import { current, keepSoon, setDefaults } from "./conversations.js";
import { disk, PREFIX } from "./disk.js";
import { loadModels, showModel } from "./models.js";
import { $ } from "./nodes.js";
import { readNumbers, readTools } from "./request.js";
import { forgetKey } from "./server.js";

const FIELDS = { // of the settings: their ids in the page
  system: "system", tools: "tools", temperature: "temperature", topP: "top-p", maxTokens: "max-tokens", seed: "seed",
};

export function showSettings() {
  for (const [name, id] of Object.entries(FIELDS)) $[id].value = current.settings[name];
  const radios = [...$.effort.elements].filter((one) => one.name === "effort");
  for (const radio of radios) radio.checked = radio.value === current.settings.effort;
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
  const numTools = tools.length === 1 ? "1 tool" : `${tools.length} tools`;
  const used = [current.settings.system.trim() && "system prompt", tools.length && numTools].filter(Boolean).join(", ");
  $.chips.textContent = used;
  $.chips.setAttribute("aria-label", `In use: ${used}. Settings`);
  $.chips.hidden = !used;
  return !problem && !numbers;
}

export function settingsAreGood() {
  if (checkSettings()) return true;
  $.settings.showModal();
  ($.tools.getAttribute("aria-invalid") === "true" ? $.tools : $.temperature).focus();
  return false;
}

function changeSettings() {
  for (const [name, id] of Object.entries(FIELDS)) {
    current.settings[name] = $[id].validity.badInput ? "?" : $[id].value;
  }
  current.settings.effort = $.effort.querySelector("input:checked")?.value ?? "max";
  setDefaults({ ...current.settings });
  disk.set(`${PREFIX}settings`, JSON.stringify(current.settings));
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

function isDark() {
  const { scheme } = document.documentElement.dataset;
  return scheme ? scheme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

export function showScheme() {
  $.theme.setAttribute("aria-pressed", String(isDark()));
  $.scheme.value = disk.get(`${PREFIX}scheme`) ?? "system";
}

export function listenToSettings() {
  const open = () => { showSettings(); $.settings.showModal(); };
  $["open-settings"].addEventListener("click", open);
  $.theme.addEventListener("click", () => setScheme(isDark() ? "light" : "dark"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showScheme);
  $.chips.addEventListener("click", open);
  for (const id of Object.values(FIELDS)) $[id].addEventListener("input", changeSettings);
  $.effort.addEventListener("change", changeSettings);
  $["tools-example"].addEventListener("click", () => {
    $.tools.value = EXAMPLE;
    changeSettings();
    $.tools.focus();
    $.tools.setSelectionRange(0, 0);
    $.tools.scrollTop = 0;
  });
  $.scheme.addEventListener("change", () => setScheme($.scheme.value));
  $["forget-key"].addEventListener("click", () => { forgetKey(); $.settings.close(); showModel(); loadModels(); });
  for (const dialog of [$.settings, $.picture]) {
    dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  }
}
