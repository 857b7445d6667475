// The changes of the prompt, and the timeline of the query. Times are seconds since the query was submitted.

import { count, element, seconds } from "./text.js";

const MOST_BARS = 8;
const MOST_TICKS = 400;
const STEPS = [1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10]; // times a power of ten: possible ends of the axis
const MARKS = [0.2, 0.25, 0.5, 1, 2, 2.5, 5, 10]; // times a power of ten: possible distances of its marks

const firstOf = (steps, least) => {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * (steps.find((step) => step * power >= least * 0.999999) ?? 10);
};

const share = (part, whole) => `${(100 * Math.min(part / whole, 1)).toFixed(3)}%`;

class Bars {
  constructor(section) {
    this._box = section.querySelector(".bars");
    this._said = Object.fromEntries(
      ["shared", "new", "invalidated", "prefilled"].map((name) => [name, section.querySelector(`.${name} dd`)]),
    );
    this._size = section.querySelector(".size");
    this._rows = [];
    this._numChanges = 0;
    this._numInvalidated = 0;
    this.numPrefilled = null; // null until the backend reports it
  }

  changed(context) {
    if (this.numPrefilled !== null) this.numPrefilled = Math.min(this.numPrefilled, context.num_shared);
    this._numChanges += 1;
    this._numInvalidated += context.num_invalidated;
    const row = element("div", "bar");
    const parts = ["shared", "new", "invalidated", "prefilled"].map((name) => element("i", name));
    row.append(...parts);
    this._box.append(row);
    this._rows.push({ row, parts, context, numPrefilled: this.numPrefilled ?? 0 });
    if (this._rows.length > MOST_BARS) this._rows.shift().row.remove();
    this._draw();
  }

  prefilled(num) {
    const last = this._rows.at(-1);
    if (!last) return;
    this.numPrefilled = last.numPrefilled = Math.min(Math.max(num, this.numPrefilled ?? 0), last.context.num_tokens);
    this._draw();
  }

  _draw() {
    const most = Math.max(
      ...this._rows.map(({ context: c }) => Math.max(c.num_tokens, c.num_shared + c.num_invalidated)),
    );
    for (const { parts, context: c, numPrefilled } of this._rows) {
      const spans = [[0, c.num_shared], [c.num_shared, c.num_tokens], [c.num_shared, c.num_shared + c.num_invalidated]];
      [...spans, [0, numPrefilled]].forEach(([from, to], i) => {
        parts[i].style.left = share(from, most);
        parts[i].style.width = share(to - from, most);
      });
    }
    const { context } = this._rows.at(-1);
    this._size.textContent = `${count(context.num_tokens)} ${context.unit}, version ${count(this._numChanges)}`;
    this._said.shared.textContent = count(context.num_shared);
    this._said.new.textContent = count(context.num_tokens - context.num_shared);
    this._said.invalidated.textContent = count(this._numInvalidated);
    this._said.prefilled.textContent = this.numPrefilled === null ? "–" : count(this.numPrefilled);
  }
}

class Timeline {
  constructor(section) {
    this._lanes = Object.fromEntries(
      ["retrieval", "prefill", "decode"].map((name) => [name, section.querySelector(`.${name}`)]),
    );
    this._axis = section.querySelector(".axis");
    this._most = 0;
    this._marks = []; // {node, from, to}: `to` is null for a point in time, undefined for an open interval
    this._numTicks = 0;
    this.fit(0.8);
  }

  begin(lane, from) {
    const mark = { node: element("i", "span"), from, to: undefined };
    this._add(lane, mark);
    return mark;
  }

  end(mark, to) {
    if (mark && mark.to === undefined) mark.to = Math.max(to, mark.from);
  }

  tick(lane, at, className = "tick") {
    if (this._numTicks++ < MOST_TICKS) this._add(lane, { node: element("i", className), from: at, to: null });
  }

  // Ends all open intervals.
  stop(at) {
    for (const mark of this._marks) this.end(mark, at);
    this.fit(at);
  }

  fit(now) {
    const most = firstOf(STEPS, Math.max(now, this._most, 0.1));
    if (most !== this._most) {
      this._most = most;
      const gap = firstOf(MARKS, most / 5);
      const marks = [];
      for (let i = 0; i * gap <= most * 1.0001; i++) {
        const mark = element("span", "", `${Number((i * gap).toPrecision(3))}${i ? "" : " s"}`);
        mark.style.left = share(i * gap, most);
        marks.push(mark);
      }
      this._axis.replaceChildren(...marks);
      this._marks.forEach((mark) => this._set(mark, now));
    }
    this._marks.filter((mark) => mark.to === undefined).forEach((mark) => this._set(mark, now));
  }

  _add(lane, mark) {
    this._lanes[lane].append(mark.node);
    this._marks.push(mark);
    this._set(mark, mark.from);
  }

  _set({ node, from, to }, now) {
    node.style.left = share(from, this._most);
    if (to !== null) node.style.width = share((to ?? Math.max(now, from)) - from, this._most);
  }
}

function usage({ num_prompt_tokens: read, num_output_tokens: wrote }) {
  if (read === null && wrote === null) return " The model’s server does not say how many tokens it read and wrote.";
  const number = (num) => (num === null ? "an unknown number of" : count(num));
  return ` The model read ${number(read)} tokens and wrote ${number(wrote)}.`;
}

export class Flow {
  constructor(section) {
    this._bars = new Bars(section);
    this._line = new Timeline(section);
    this._overlap = section.querySelector(".overlap");
    this._times = Object.fromEntries(
      ["retrieval", "first", "after", "total"].map((name) => [name, section.querySelector(`.t-${name}`)]),
    );
    this._numTokens = 0; // of the newest prompt
    this._retrieval = this._prefill = this._decode = null;
    this._retrievedS = this._firstS = this._beganMs = null;
    this._lastS = this._askedS = 0;
    this._frame = 0;
  }

  event(name, values) {
    const at = values.at_s;
    if (typeof at !== "number") return;
    this._lastS = Math.max(this._lastS, at);
    this._beganMs = Math.min(this._beganMs ?? Infinity, performance.now() - 1000 * at);
    this._line.fit(at);
    switch (name) {
      case "retrieval_started":
        this._retrieval = this._line.begin("retrieval", at);
        break;
      case "committed":
        this._askedS = at;
        this._overlap.textContent = `Retrieval began ${seconds(at)} before you asked. `;
        break;
      case "chunk_arrived":
        this._line.tick("retrieval", at);
        break;
      case "context_changed":
        this._numTokens = values.num_tokens;
        this._unit = values.unit;
        this._bars.changed(values);
        if (!this._prefill || this._prefill.to !== undefined) this._prefill = this._line.begin("prefill", at);
        break;
      case "prefill_progressed":
        this._bars.prefilled(values.num_tokens);
        if (values.num_tokens >= this._numTokens) this._end(this._prefill, at);
        break;
      case "context_complete":
        this._completed(at);
        break;
      case "tokens_generated":
        if (this._firstS === null && (values.text || values.token_ids.length)) this._began(at);
        break;
      case "answered":
        this._times.total.textContent = seconds(at - this._askedS);
        this._overlap.append(usage(values.answer));
        this.stop();
    }
    if (name !== "answered") this._frame ||= requestAnimationFrame(() => this._go());
  }

  // Called when the query has ended, for any reason.
  stop() {
    cancelAnimationFrame(this._frame);
    this._frame = -1;
    this._line.stop(this._lastS);
  }

  _completed(at) {
    this._retrievedS = at;
    this._end(this._retrieval, at);
    this._times.retrieval.textContent = seconds(at);
    const num = this._bars.numPrefilled;
    if (num) {
      const all = `of the prompt’s ${count(this._numTokens)} ${this._unit}`;
      this._overlap.append(`When retrieval ended, ${count(num)} ${all} had been prefilled.`);
    }
  }

  _began(at) {
    this._firstS = at;
    this._end(this._prefill, at);
    this._line.tick("decode", at, "first");
    this._decode = this._line.begin("decode", at);
    this._times.first.textContent = seconds(at - this._askedS);
    if (this._retrievedS !== null) this._times.after.textContent = seconds(at - this._retrievedS);
  }

  _end(mark, at) {
    this._line.end(mark, at);
    this._line.fit(at);
  }

  _go() {
    if (this._frame === -1) return;
    this._line.fit((performance.now() - this._beganMs) / 1000);
    this._frame = requestAnimationFrame(() => this._go());
  }
}
