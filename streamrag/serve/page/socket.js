// The WebSocket of a session. It reconnects when the connection is lost, and resumes after the last event received.

import { key } from "./key.js";
import { Gone, Refused, call } from "./stream.js";

const LONGEST_PAUSE_MS = 10_000; // between attempts
const CLOSED = 1000;
const REFUSED = 1008;

// A browser's WebSocket cannot send headers, so the key is sent as a subprotocol.
const protocols = (given) => {
  const coded = given && btoa(given).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
  return given ? ["streamrag", `streamrag-key.${coded}`] : ["streamrag"];
};

// Opens a WebSocket at a path of the service, with the key.
export function connect(path, search = "") {
  const url = new URL(path, location.href);
  url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
  url.hash = "";
  url.search = search;
  return new WebSocket(url, protocols(key.get()));
}

export class SessionSocket {
  // heard: called with each frame that answers no request. lost: called when the connection is lost, before it
  // reconnects. ended: called once, with the reason, when the session has ended.
  constructor(id, { heard, lost, ended }) {
    this._id = id;
    this._heard = heard;
    this._lost = lost;
    this._ended = ended;
    this._open = new Map(); // handlers of open requests by id
    this._numSent = 0;
    this._lastEvent = 0;
    this._pauseMs = 500;
    this._isOver = false;
    this._connect();
  }

  // Resolves with the response frame; rejects with Refused or Gone.
  append(data) {
    return new Promise((resolve, reject) => this._send("append", { data }, { appended: resolve, failed: reject }));
  }

  // hears: handlers: `tokens_generated`, then one of `answered`, `cancelled` and `failed`. Returns the id, for `cancel`.
  ask(question, hears) {
    return this._send("ask", { question }, hears);
  }

  cancel(id) {
    if (this._open.has(id)) this._socket.send(JSON.stringify({ type: "cancel", id }));
  }

  close() {
    this._isOver = true;
    this._socket.close();
    this._fail(new Gone("the session was left"));
  }

  _send(type, values, hears) {
    const id = String(++this._numSent);
    if (this._socket.readyState !== WebSocket.OPEN) {
      hears.failed(new Gone("there is no connection"));
      return id;
    }
    this._open.set(id, hears);
    this._socket.send(JSON.stringify({ type, id, ...values }));
    return id;
  }

  _connect() {
    const path = `v1/sessions/${encodeURIComponent(this._id)}/socket`;
    const socket = (this._socket = connect(path, `last_event_id=${this._lastEvent}`));
    socket.addEventListener("message", (event) => this._take(JSON.parse(event.data)));
    socket.addEventListener("close", (event) => this._closed(event));
  }

  _take(frame) {
    if (frame.event_id) this._lastEvent = frame.event_id;
    if (frame.type === "session") this._pauseMs = 500;
    const hears = this._open.get(frame.id);
    if (frame.type === "session" || !hears) {
      if (frame.error?.code !== "ask_not_found") this._heard(frame); // the answer and `cancel` have crossed
    } else if (frame.type === "error") {
      this._open.delete(frame.id);
      hears.failed(new Refused(frame.status, frame.error, null));
    } else {
      if (frame.type !== "tokens_generated") this._open.delete(frame.id);
      hears[frame.type]?.(frame);
    }
  }

  _fail(error) {
    const open = [...this._open.values()];
    this._open.clear();
    for (const hears of open) hears.failed(error);
  }

  async _closed({ code }) {
    if (this._isOver) return;
    this._fail(new Gone("the connection broke"));
    if (code === CLOSED) {
      this._end(new Refused(404, { message: "The session has ended" }, null));
      return;
    }
    if (code !== REFUSED) this._lost(); // otherwise an error frame came before; a restarted service may have the session again
    try {
      await call("GET", `v1/sessions/${encodeURIComponent(this._id)}`, undefined, key.get());
    } catch (error) {
      // A failed handshake has no reason, but this request gets one.
      if (error instanceof Refused && (error.status === 401 || error.status === 404)) {
        this._end(error);
        return;
      }
    }
    await new Promise((resolve) => setTimeout(resolve, this._pauseMs));
    this._pauseMs = Math.min(2 * this._pauseMs, LONGEST_PAUSE_MS);
    if (!this._isOver) this._connect();
  }

  _end(error) {
    if (!this._isOver) this._ended(error);
    this._isOver = true;
  }
}
