// The passages of one query, in prompt order.

import { address, count, element, isStill, link, plain } from "./text.js";

const LONG = 90; // characters that may not fit into two lines
const MOVE_MS = 350;

const keyOf = (chunk) => JSON.stringify([chunk.uri, chunk.passage]);

class Passage {
  constructor(id) {
    this.id = id;
    this.isDropped = false;
    this.item = element("li", "passage");
    this.item.id = id;
    this.item.tabIndex = -1;
    this._number = element("span", "number");
    this._title = element("h4");
    this._title.dir = "auto";
    this._score = element("span", "score");
    this._address = element("p", "address");
    this._address.dir = "ltr";
    this._text = element("p", "excerpt");
    this._text.dir = "auto";
    this._more = element("button", "more quiet", "more");
    this._more.type = "button";
    this._more.setAttribute("aria-expanded", "false");
    this._more.addEventListener("click", () => this._open(!this.item.classList.contains("open")));
    this._fate = element("span", "fate");
    const head = element("div", "head");
    head.append(this._title, this._fate, this._score);
    const place = element("div", "place");
    place.append(this._address, this._more);
    this.item.append(this._number, head, place, this._text);
  }

  fill(chunk) {
    const { shown, href } = address(chunk.uri);
    this.title = plain(chunk.title).trim() || shown || "untitled";
    this._title.replaceChildren(href ? link(href, this.title) : this.title);
    this._address.textContent = shown;
    this._score.textContent = typeof chunk.score === "number" ? chunk.score.toPrecision(3) : "";
    this._score.title = "score";
    const text = plain(chunk.text).replace(/[ \t]+/g, " ").replace(/\s*\n\s*\n\s*/g, "\n\n").trim();
    this._text.textContent = text;
    this._more.hidden = text.length <= LONG && !text.includes("\n");
    this._more.setAttribute("aria-label", `more of ${this.title}`);
  }

  // numbers: the passage's numbers in the prompt, if any. fate: why it is not in the prompt, or "".
  place(numbers, fate) {
    this._number.textContent = numbers.join(", ");
    this._fate.textContent = fate;
    this.isDropped = fate !== "";
    this.item.classList.toggle("dropped", this.isDropped);
  }

  // Scrolls the list, but not the page, until the passage is visible.
  light(isOn) {
    this.item.classList.toggle("lit", isOn);
    const box = this.item.closest(".passages");
    if (!isOn || !box) return;
    const [own, its] = [this.item.getBoundingClientRect(), box.getBoundingClientRect()];
    const above = own.top - its.top;
    const by = above < 0 ? above : Math.min(Math.max(own.bottom - its.bottom, 0), above);
    if (by) box.scrollBy({ top: by, behavior: isStill() ? "auto" : "smooth" });
  }

  _open(isOpen) {
    this.item.classList.toggle("open", isOpen);
    this._more.setAttribute("aria-expanded", String(isOpen));
    this._more.textContent = isOpen ? "less" : "more";
  }
}

export class Passages {
  constructor(section, turnId, reveal) {
    this._section = section;
    this._list = section.querySelector("ol");
    this._count = section.querySelector(".count");
    this._notes = section.querySelector(".notes");
    this._turnId = turnId;
    this._reveal = reveal;
    this._byKey = new Map();
    this._byNumber = [];
    this._wereIn = new Set();
    this._ranked = []; // in the order to display
    this._frame = 0;
  }

  get size() {
    return this._byNumber.length;
  }

  byNumber(number) {
    return this._byNumber[number - 1];
  }

  arrived(chunk) {
    const key = keyOf(chunk);
    let passage = this._byKey.get(key);
    if (!passage) {
      passage = new Passage(`${this._turnId}-p${this._byKey.size + 1}`);
      this._byKey.set(key, passage);
      passage.item.classList.add("new");
      const dropped = this._ranked.findIndex((each) => each.isDropped);
      this._ranked.splice(dropped === -1 ? this._ranked.length : dropped, 0, passage);
      this._soon();
    }
    passage.fill(chunk);
    if (!this.size) this._tell(`${count(this._byKey.size)} found`);
  }

  // chunks: the chunks in the prompt, in its order. Earlier ones that are missing were dropped.
  order(chunks, { isComplete = false } = {}) {
    const numbers = new Map();
    this._byNumber = chunks.map((chunk, i) => {
      const passage = this._byKey.get(keyOf(chunk));
      if (passage) numbers.set(passage, [...(numbers.get(passage) ?? []), i + 1]);
      return passage;
    });
    const others = [...this._byKey.values()].filter((passage) => !numbers.has(passage));
    for (const [passage, its] of numbers) {
      passage.place(its, "");
      this._wereIn.add(passage);
    }
    for (const passage of others) {
      passage.place([], this._wereIn.has(passage) ? "dropped" : isComplete ? "left out" : "");
    }
    const [waiting, dropped] = [others.filter((each) => !each.isDropped), others.filter((each) => each.isDropped)];
    this._ranked = [...numbers.keys(), ...waiting, ...dropped];
    this._soon();
    this._tell(`${count(numbers.size)} of ${count(this._byKey.size)}`);
  }

  note(text) {
    this._notes.append(element("li", "", plain(text)));
  }

  // Puts all items in order.
  finish() {
    cancelAnimationFrame(this._frame);
    this._arrange();
  }

  // Scrolls to a passage; Escape scrolls back to its citation.
  show(passage, cite) {
    this._reveal();
    passage.item.scrollIntoView({ block: "nearest", inline: "nearest", behavior: isStill() ? "auto" : "smooth" });
    passage.item.focus({ preventScroll: true });
    passage.item.onkeydown = (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        cite.focus();
      }
    };
  }

  _tell(text) {
    this._count.textContent = text;
  }

  // Updates the list at most once per animation frame.
  _soon() {
    this._frame ||= requestAnimationFrame(() => this._arrange());
  }

  // Animates moved items that are visible.
  _arrange() {
    this._frame = 0;
    const had = document.activeElement;
    const items = isStill() ? [] : [...this._list.children];
    const before = items.map((item) => item.getBoundingClientRect());
    this._ranked.forEach((passage, i) => {
      const there = this._list.children[i];
      if (there !== passage.item) this._list.insertBefore(passage.item, there ?? null);
    });
    if (had !== document.activeElement && this._list.contains(had)) had.focus({ preventScroll: true });
    if (!items.length) return;
    const box = this._section.getBoundingClientRect();
    const isSeen = (at) => at.bottom > box.top && at.top < box.bottom;
    const moved = items.map((item, i) => [item, before[i], item.getBoundingClientRect()]);
    for (const [item, from, to] of moved.filter(([, from, to]) => isSeen(from) && isSeen(to) && from.top !== to.top)) {
      const there = { transform: `translateY(${from.top - to.top}px)` };
      item.animate([there, { transform: "none" }], { duration: MOVE_MS, easing: "ease-out" });
    }
  }
}
