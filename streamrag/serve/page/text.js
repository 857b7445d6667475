// Sanitizes untrusted text. It is only ever put into text nodes, never into markup.

// Control characters, bidirectional marks, and invisible characters.
const UNSEEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\u{e0000}-\u{e007f}]/gu;
const UNSEEN_IN_ADDRESSES = /[\s\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u3164\uffa0]/gu;

export function plain(text) {
  return String(text ?? "").replace(/\r\n?|[\u2028\u2029]/g, "\n").replace(UNSEEN, "");
}

// The origin of a passage: its label, and a link if its scheme is safe.
export function address(uri) {
  const shown = plain(uri).replace(UNSEEN_IN_ADDRESSES, "");
  let url;
  try {
    url = new URL(String(uri));
  } catch {
    return { shown, href: null };
  }
  if (url.protocol !== "http:" && url.protocol !== "https:") return { shown, href: null };
  url.username = url.password = "";
  let rest = url.pathname + url.search + url.hash;
  try {
    rest = decodeURI(rest);
  } catch {
    // invalid UTF-8: displayed as it is
  }
  rest = plain(rest).replace(UNSEEN_IN_ADDRESSES, "");
  return { shown: url.host + (rest === "/" ? "" : rest), href: url.href };
}

export function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

export function link(href, text) {
  const made = element("a", "", text);
  made.href = href;
  made.target = "_blank";
  made.rel = "noopener noreferrer nofollow";
  return made;
}

export const count = (number) => number.toLocaleString("en");

export const seconds = (value) => `${value.toFixed(value < 9.995 ? 2 : 1)} s`;

export const isStill = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
