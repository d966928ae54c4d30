// What may be anything as what it should be, new ids, and figures as a person reads them.

export const text = (value) => (typeof value === "string" ? value : "");
export const list = (value) => (Array.isArray(value) ? value : []);
export const object = (value) => (value !== null && typeof value === "object" && !Array.isArray(value) ? value : {});
export const count = (value) => (Number.isFinite(value) && value >= 0 ? value : null);

export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(8));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function secondsText(seconds) {
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
}

export const tokensText = (n) => `${n.toLocaleString("en")} ${n === 1 ? "token" : "tokens"}`;
