// The models of the server, which of them is asked, and what it can do.

import { $, h } from "./nodes.js";
import { hideNotice, notify } from "./notices.js";
import { askWithKey, keyOf } from "./server.js";
import { count, list, object, text, tokensText } from "./values.js";

let models = [];
export let model = null;

export async function loadModels() {
  try {
    const found = object(await (await askWithKey("v1/models")).json());
    models = list(found.data).map(object).filter((one) => text(one.id));
    model = models.find((one) => one.id === model?.id) ?? models[0] ?? null;
    hideNotice();
  } catch (error) {
    notify(error.message, "Retry", loadModels);
  }
  showModel();
}

export const sees = () => list(model?.input_modalities).includes("image");

export function showModel() {
  $.model.replaceChildren();
  if (models.length > 1) {
    const onchange = () => { model = models[select.selectedIndex]; showModel(); };
    const select = h("select", { "aria-label": "Model", onchange },
      ...models.map((one) => h("option", { selected: one === model }, one.id)));
    $.model.append(select);
  } else $.model.textContent = model?.id ?? "";
  $.model.title = model ? model.id : "";
  const length = count(model?.max_model_len);
  const room = length && `${tokensText(length)} of context`;
  const about = [model && `${model.id} answers here`, room, sees() && "sees pictures"];
  $.about.textContent = about.filter(Boolean).join(" · ");
  $.attach.hidden = !sees();
  const efforts = list(model?.reasoning_efforts);
  for (const radio of $.effort.elements) {
    if (efforts.length && radio.value !== "off") radio.parentElement.hidden = !efforts.includes(radio.value);
  }
  $["forget-key"].hidden = !keyOf();
}
