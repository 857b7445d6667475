// The data of a session: lines that are typed or pasted, files, and the data of other clients. Each line is one chunk.

import { count, element, plain } from "./text.js";

const MOST_LINES = 500; // maximum lines that are displayed
const LONGEST_LINE = 50_000; // characters; longer lines are split
const MOST_OF_BATCH = 500; // lines
const LONGEST_BATCH = 100_000; // characters

const wellFormed = (text) => text.toWellFormed?.() ?? text;

// Returns the lines that are not blank, split where they are too long.
function* lines(text) {
  for (const line of text.split(/\r\n|[\n\r]/)) {
    if (!line.trim()) continue;
    for (let at = 0; at < line.length; at += LONGEST_LINE) yield wellFormed(line.slice(at, at + LONGEST_LINE));
  }
}

// Yields the lines of a file while it is read.
async function* linesOf(file) {
  const reader = file.stream().pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      if (value.includes("\0")) throw new TypeError("not a text");
      const text = rest + value;
      const end = text.lastIndexOf("\n") + 1 || (text.length > LONGEST_LINE ? text.length : 0);
      yield* lines(text.slice(0, end));
      rest = text.slice(end);
    }
    yield* lines(rest);
  } finally {
    reader.cancel().catch(() => {}); // already at its end or cancelled
  }
}

async function* batches(all) {
  let batch = [];
  let num = 0;
  for await (const line of all) {
    if (batch.length === MOST_OF_BATCH || (batch.length && num + line.length > LONGEST_BATCH)) {
      yield batch;
      [batch, num] = [[], 0];
    }
    batch.push(line);
    num += line.length;
  }
  if (batch.length) yield batch;
}

export class Feed {
  // session: has `append(lines)`; `stands(version)`, a promise; and `newest(behind)`, the data of the window after a
  // version. told: called with errors.
  constructor(section, session, told) {
    this._session = session;
    this._told = told;
    this._list = section.querySelector(".lines");
    this._count = section.querySelector(".count");
    this._progress = section.querySelector(".progress");
    this._stop = section.querySelector(".file button");
    this._list.replaceChildren();
    this._newest = 0;
    this._wasLeft = false;
    this._isReading = false;
    this._wasStopped = false;
    this._isCatchingUp = false;
    this._shown = new Map(); // list items by version
    this._seen = 0; // all lines up to this version are displayed, or too old
    this._stop.onclick = () => (this._wasStopped = true);
    this._say("or drop one on this page");
  }

  drawCount(numAppended) {
    this._count.textContent = `${count(numAppended)} appended`;
  }

  // Displays the data of other clients up to this version.
  async catchUp(version) {
    this._newest = version;
    if (this._isCatchingUp) return;
    this._isCatchingUp = true;
    try {
      while (this._seen < this._newest && !this._wasLeft) {
        const to = this._newest;
        let from = Math.max(this._seen, to - MOST_LINES);
        while (from < to && this._shown.has(from + 1)) from += 1; // sent by this page
        if (from < to) for (const each of await this._session.newest(from)) this._put(each.text, each.version);
        this._seen = to;
      }
    } catch (error) {
      this._told(error);
    } finally {
      this._isCatchingUp = false;
    }
  }

  // Returns whether all lines were sent.
  async appendText(text) {
    try {
      for await (const _ of this._append(batches(lines(text))));
      return true;
    } catch (error) {
      this._told(error);
      return false;
    }
  }

  // Sends no faster than the session ingests, so that the beginning of a file is not dropped.
  async appendFile(file) {
    if (this._isReading) return;
    this._isReading = true;
    this._wasStopped = false;
    this._stop.hidden = false;
    const name = plain(file.name).slice(0, 80);
    let num = 0;
    try {
      for await (const numMore of this._append(batches(linesOf(file)))) {
        num += numMore;
        this._say(`${name}: ${count(num)} lines`);
        if (this._wasStopped) break;
      }
      this._say(this._wasStopped ? `${name}: stopped after ${count(num)} lines` : `${name}: all ${count(num)} lines`);
    } catch (error) {
      const isNone = error instanceof TypeError || error instanceof DOMException;
      this._say(isNone ? `${name} is not a text file` : `${name}: ended after ${count(num)} lines`);
      if (!isNone) this._told(error);
    } finally {
      this._isReading = false;
      this._stop.hidden = true;
    }
  }

  leave() {
    this._wasStopped = this._wasLeft = true;
  }

  // Yields the number of lines sent after each batch. The next batch is sent while the session ingests the last one.
  async *_append(all) {
    let [before, last] = [0, 0];
    for await (const batch of all) {
      await this._session.stands(before);
      const { version } = await this._session.append(batch);
      [before, last] = [last, version];
      this._show(batch, version);
      yield batch.length;
    }
  }

  // Inserts lines, newest first, each with its version.
  _show(batch, version) {
    const first = version - batch.length + 1;
    batch.forEach((line, i) => this._put(line, first + i));
  }

  _put(line, version) {
    if (this._shown.has(version) || version <= this._newest - MOST_LINES) return;
    const item = element("li", "", plain(line));
    item.dataset.version = count(version);
    item.version = version;
    this._shown.set(version, item);
    let older = this._list.firstChild;
    while (older && older.version > version) older = older.nextSibling;
    this._list.insertBefore(item, older);
    while (this._list.children.length > MOST_LINES) {
      this._shown.delete(this._list.lastChild.version);
      this._list.lastChild.remove();
    }
  }

  _say(text) {
    this._progress.textContent = text;
  }
}
