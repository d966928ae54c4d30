// Light or dark before anything is painted: the one script that is no module, for modules wait until the page is read.
"use strict";

function applyScheme() {
  let scheme = null;
  try { scheme = localStorage.getItem("openk3.scheme"); } catch { /* refused: as the system has it */ }
  if (scheme === "light" || scheme === "dark") document.documentElement.dataset.scheme = scheme;
  else delete document.documentElement.dataset.scheme;
}

applyScheme();
