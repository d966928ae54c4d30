// What the browser keeps by name: it may refuse, and then the chat works without.

export const PREFIX = "openk3.";
export const CHAT = `${PREFIX}chat.`;

export const disk = {
  get(name, area = local()) { try { return area.getItem(name); } catch { return null; } },
  set(name, value, area = local()) { try { area.setItem(name, value); return true; } catch { return false; } },
  remove(name, area = local()) { try { area.removeItem(name); } catch { /* nothing was kept */ } },
  names() { try { return Object.keys(localStorage); } catch { return []; } },
};

function local() { try { return localStorage; } catch { return null; } }
export function session() { try { return sessionStorage; } catch { return null; } }
