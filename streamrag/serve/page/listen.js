// A question that is still being typed: the service retrieves for it over a WebSocket until it is asked.

import { key } from "./key.js";
import { connect } from "./socket.js";
import { Gone, Refused } from "./stream.js";

const PAUSE_MS = 30_000; // after an error, unless the key changes

export class Listener {
  // show: called with the titles of the passages found so far, or with null if nothing is retrieved.
  constructor(show) {
    this._show = show;
    this._numAsked = 0;
    this._socket = null;
    this._pausedMs = -Infinity;
    this._forget();
  }

  // text: all that is typed so far. history: the earlier turns.
  type(text, history) {
    if (this._socket && this._key !== key.get()) {
      this._socket.close();
      this._socket = null;
      this._forget();
    }
    if (!text) return this.drop();
    this._newest = { text, history };
    if (this._socket) return this._send();
    if (performance.now() < this._pausedMs + PAUSE_MS && key.get() === this._pausedKey) return;
    const socket = (this._socket = connect("v1/ask/socket"));
    this._key = key.get();
    socket.addEventListener("open", () => this._send());
    socket.addEventListener("message", (event) => this._take(JSON.parse(event.data)));
    socket.addEventListener("close", () => {
      if (socket !== this._socket) return; // its key was forgotten
      this._socket = null;
      this._fail(new Gone("the connection broke"));
    });
  }

  drop() {
    if (this._id) this._put("cancel", {});
    this._forget();
  }

  // Asks the question that was typed, and calls `hear` with the name and the values of each event. Returns a promise
  // that rejects as `ask` throws, or null if the service knows nothing of the question.
  ask(question, signal, hear) {
    if (!this._id || this._socket?.readyState !== WebSocket.OPEN || this._key !== key.get()) {
      this.drop();
      return null;
    }
    this._show(null);
    return new Promise((resolve, reject) => {
      this._asked = { hear, resolve, reject, isCommitted: false };
      signal.addEventListener("abort", () => {
        if (this._asked?.hear === hear) this.drop();
        reject(signal.reason);
      });
      this._put("commit", { question });
    });
  }

  _forget() {
    this._id = this._newest = this._asked = null;
    this._early = []; // the events of the newest retrieval before the question is asked
    this._show(null);
  }

  _fail(error) {
    if (this._asked) {
      this._asked.reject(error);
      this._put("cancel", {}); // the error may be of an earlier partial question
    } else {
      [this._pausedMs, this._pausedKey] = [performance.now(), key.get()];
      this._socket?.close();
    }
    this._forget();
  }

  _put(type, values) {
    if (this._socket?.readyState === WebSocket.OPEN) this._socket.send(JSON.stringify({ type, id: this._id, ...values }));
  }

  _send() {
    if (this._socket.readyState !== WebSocket.OPEN || !this._newest) return;
    if (!this._id) {
      this._id = String(++this._numAsked);
      this._put("open", { history: this._newest.history });
    }
    this._put("partial", { question: this._newest.text });
  }

  _take(frame) {
    if (frame.id !== this._id) return; // of a question that was dropped
    if (this._asked?.isCommitted) {
      this._asked.hear(frame.type, frame);
      if (frame.type !== "answered" && frame.type !== "error") return;
      this._asked.resolve();
      this._forget();
    } else if (frame.type === "error") {
      const waitS = Number.parseInt(frame.error.headers?.["retry-after"], 10);
      this._fail(new Refused(frame.status, frame.error, waitS || null));
    } else if (frame.type === "committed") {
      this._asked.isCommitted = true;
      if (frame.at_s !== null) for (const early of this._early) this._asked.hear(early.type, early);
      this._asked.hear(frame.type, frame);
    } else {
      if (frame.type === "retrieval_started") this._early = [];
      this._early.push(frame);
      const found = this._early.filter(({ type }) => type === "chunk_arrived");
      if (!this._asked) this._show(found.map(({ chunk }) => chunk.title || chunk.uri));
    }
  }
}
