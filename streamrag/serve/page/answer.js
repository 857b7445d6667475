// The growing answer. [2] and [1, 3] become links to the passages with these numbers.

import { element, plain } from "./text.js";

const MARK = /\[(\d{1,4}(?:\s?,\s?\d{1,4}){0,15})\]/g;
const UNFINISHED = /\[[\d\s,]{0,94}$/;

export class Answer {
  // passages: has `byNumber(n)` and `show(n)`. spoken: the live region for screen readers.
  constructor(place, passages, spoken) {
    this.text = "";
    this._place = place;
    this._passages = passages;
    this._spoken = spoken;
    this._waiting = ""; // received, not yet drawn
    this._held = null; // a text node whose end may become a citation
    this._unsaid = "";
    this._frame = 0;
    this._received = "";
    this._draft = "";
    this._grey = element("span", "draft"); // stands behind all else
    this._grey.setAttribute("aria-hidden", "true");
    this._place.append(this._grey);
  }

  // text: a draft of the whole answer. What is not confirmed of it is shown in grey.
  draft(text) {
    this._draft = plain(text);
    this._frame ||= requestAnimationFrame(() => this._draw());
  }

  add(text) {
    this.text += text;
    this._waiting += plain(text);
    this._received += plain(text);
    this._unsaid += plain(text);
    const end = Math.max(this._unsaid.lastIndexOf(". "), this._unsaid.lastIndexOf("\n")) + 1;
    if (end > 40) this._say(end);
    this._frame ||= requestAnimationFrame(() => this._draw());
  }

  finish() {
    this._draft = "";
    cancelAnimationFrame(this._frame);
    this._draw(true);
    this._say(this._unsaid.length);
  }

  _say(end) {
    if (this._unsaid.trim()) this._spoken.append(element("p", "", this._unsaid.slice(0, end).trim()));
    this._unsaid = this._unsaid.slice(end);
  }

  _draw(isLast = false) {
    this._frame = 0;
    if (this._held) this._held.remove();
    this._held = null;
    const open = isLast ? null : UNFINISHED.exec(this._waiting);
    const ready = open ? this._waiting.slice(0, open.index) : this._waiting;
    let at = 0;
    for (const match of ready.matchAll(MARK)) {
      this._put(ready.slice(at, match.index));
      this._grey.before(this._marks(match[1]));
      at = match.index + match[0].length;
    }
    this._put(ready.slice(at));
    this._waiting = open ? open[0] : "";
    if (open) this._grey.before((this._held = document.createTextNode(open[0])));
    this._grey.textContent = this._draft.startsWith(this._received) ? this._draft.slice(this._received.length) : "";
  }

  _put(text) {
    const last = this._grey.previousSibling;
    if (last?.nodeType === Node.TEXT_NODE) last.appendData(text);
    else if (text) this._grey.before(text);
  }

  _marks(numbers) {
    const marks = element("span", "marks");
    marks.append("[");
    numbers.split(",").forEach((written, i) => {
      if (i) marks.append(", ");
      const number = Number.parseInt(written, 10);
      const passage = this._passages.byNumber(number);
      marks.append(passage ? this._link(number, passage) : written.trim());
    });
    marks.append("]");
    return marks;
  }

  _link(number, passage) {
    const cite = element("a", "cite", String(number));
    cite.href = `#${passage.id}`;
    cite.setAttribute("aria-label", `passage ${number}, ${passage.title}`);
    const light = (isOn) => () => passage.light(isOn);
    for (const on of ["pointerenter", "focus"]) cite.addEventListener(on, light(true));
    for (const off of ["pointerleave", "blur"]) cite.addEventListener(off, light(false));
    cite.addEventListener("click", (event) => {
      event.preventDefault();
      this._passages.show(passage, cite);
    });
    return cite;
  }
}
