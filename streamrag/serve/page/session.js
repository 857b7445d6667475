// The second view: a session, its data and its questions.

import { Asks, Watches } from "./asked.js";
import { Feed } from "./feed.js";
import { askForKey, key } from "./key.js";
import { Regions } from "./regions.js";
import { SessionSocket } from "./socket.js";
import { Gone, Refused, call, inWords } from "./stream.js";
import { count, element, plain } from "./text.js";

const NAME = "streamrag.session"; // in the tab's storage, so that a reloaded page finds its session
const MOST_VERSIONS = 1000; // maximum versions whose size is stored
const MOST_SAID = 20; // maximum messages for screen readers

const byId = (id) => document.getElementById(id);
const opening = byId("opening");
const after = opening.querySelector(".after");
const live = byId("live");
const notice = byId("notice");
const regions = new Regions(byId("regions"));

let current = null;

const kept = {
  get() {
    try {
      return sessionStorage.getItem(NAME);
    } catch {
      return null; // storage is disabled
    }
  },
  set(id) {
    try {
      if (id === null) sessionStorage.removeItem(NAME);
      else sessionStorage.setItem(NAME, id);
    } catch {
      // the session ends with the page
    }
  },
};

const pathOf = (id, ...rest) => ["v1", "sessions", ...[id, ...rest].map(encodeURIComponent)].join("/");

const wordsOf = (error) =>
  plain(error instanceof Refused ? error.message : "The service cannot be reached, or the connection broke.");

function say(text) {
  const spoken = byId("spoken");
  spoken.append(element("p", "", text));
  while (spoken.children.length > MOST_SAID) spoken.firstChild.remove();
}

function tell(text) {
  notice.textContent = text;
}

class Session {
  constructor(id) {
    this.id = id;
    this.version = -1;
    this._waiting = []; // {version, resolve}
    this._tokens = new Map(); // by version
    const heard = (frame) => this._hear(frame);
    const lost = () => tell("The connection was lost. Trying again.");
    this._socket = new SessionSocket(id, { heard, lost, ended: (error) => this._ended(error) });
    this.feed = new Feed(byId("feed"), this, (error) => tell(wordsOf(error)));
    const changed = (numOpen) => regions.drawQuestions(numOpen);
    this.asks = new Asks(byId("asks"), this, { changed, tokensAt: (version) => this._tokens.get(version), say });
    this.watches = new Watches(byId("watches"), { dropped: (name) => this._unwatch(name), say });
    regions.drawQuestions(0);
  }

  append(lines) {
    return this._socket.append(lines);
  }

  ask(question, hears) {
    return this._socket.ask(question, hears);
  }

  async newest(behind) {
    return (await call("GET", `${pathOf(this.id, "data")}?behind=${behind}`, undefined, key.get())).data;
  }

  cancel(id) {
    this._socket.cancel(id);
  }

  // Resolves once questions are answered from this version or a newer one.
  stands(version) {
    if (version <= this.version) return Promise.resolve();
    return new Promise((resolve, reject) => this._waiting.push({ version, resolve, reject }));
  }

  // Watches a question; returns whether the service accepted it.
  async watch(question, answers) {
    const name = `page-${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}`;
    try {
      await call("PUT", pathOf(this.id, "watches", name), { question, answers }, key.get());
    } catch (error) {
      tell(wordsOf(error));
      return false;
    }
    this.watches.add(name, question).ask(question); // its first answer may have arrived already
    return true;
  }

  async end() {
    try {
      await call("DELETE", pathOf(this.id), undefined, key.get());
    } catch (error) {
      if (!(error instanceof Refused && error.status === 404)) {
        tell(wordsOf(error));
        return;
      }
    }
    this.leave("");
  }

  leave(words) {
    this._socket.close();
    this.feed.leave();
    this.watches.leave();
    for (const { reject } of this._waiting.splice(0)) reject(new Gone("the session was left"));
    if (current !== this) return;
    current = null;
    kept.set(null);
    live.hidden = true;
    opening.hidden = false;
    after.replaceChildren();
    if (words) after.append(element("p", "note", words));
    byId("system").focus();
  }

  _hear(frame) {
    switch (frame.type) {
      case "session":
        tell("");
        this.watches.keep(frame.watches);
        this._stand(frame);
        break;
      case "data_updated":
        this._stand(frame);
        break;
      case "flash_ready":
        this.watches.ready(frame);
        break;
      case "flash_failed":
        this.watches.failed(frame);
        break;
      case "data_dropped":
        tell(`${count(frame.num_chunks)} chunks of data were dropped: more came than could be taken in.`);
        break;
      case "log_failed":
        tell(plain(`The service cannot store the session's text at the moment: ${frame.reason}`));
        break;
      case "error":
        tell(plain(inWords(frame.error)));
    }
  }

  _stand(state) {
    this._tokens.set(state.version, state.num_tokens);
    if (this._tokens.size > MOST_VERSIONS) this._tokens.delete(this._tokens.keys().next().value);
    if (state.version < this.version) return; // an outdated event
    this.version = state.version;
    regions.draw(state);
    this.feed.drawCount(state.num_appended);
    this.feed.catchUp(state.version);
    const ready = this._waiting.filter((each) => each.version <= this.version);
    this._waiting = this._waiting.filter((each) => each.version > this.version);
    for (const { resolve } of ready) resolve();
  }

  async _unwatch(name) {
    try {
      await call("DELETE", pathOf(this.id, "watches", name), undefined, key.get());
    } catch (error) {
      if (!(error instanceof Refused && error.status === 404)) {
        tell(wordsOf(error));
        return;
      }
    }
    this.watches.remove(name);
  }

  _ended(error) {
    if (error.status === 401) key.set(null);
    this.leave(error.status === 401 ? "The service no longer accepts the API key." : "The session has ended.");
  }
}

function enter(id) {
  kept.set(id);
  opening.hidden = true;
  live.hidden = false;
  tell("");
  current = new Session(id);
  byId("data").focus();
}

async function open() {
  const given = key.get();
  const system = byId("system").value.trim();
  const tokens = byId("window").valueAsNumber;
  const body = { ...(system ? { system } : {}), ...(tokens > 0 ? { window_tokens: tokens } : {}) };
  const button = opening.querySelector("button");
  button.disabled = true;
  after.replaceChildren();
  try {
    enter((await call("POST", "v1/sessions", body, given)).id);
  } catch (error) {
    if (error instanceof Refused && error.status === 401) {
      key.set(null);
      askForKey(byId("key-of-session"), "session-key", given !== null, () => {
        byId("key-of-session").replaceChildren();
        open();
      });
    } else {
      const words = element("p", "", wordsOf(error));
      words.setAttribute("role", "alert");
      const box = element("div", "failure");
      box.append(words);
      after.append(box);
    }
  } finally {
    button.disabled = false;
  }
}

// Enter sends; Shift and Enter starts a new line.
function sends(field) {
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      field.form.requestSubmit();
    }
  });
}

async function emptied(field, work) {
  const text = field.value;
  if (!text.trim()) return;
  field.value = "";
  if (!(await work(text)) && !field.value) field.value = text; // it was not accepted
}

opening.addEventListener("submit", (event) => {
  event.preventDefault();
  if (!current) open();
});

byId("appending").addEventListener("submit", (event) => {
  event.preventDefault();
  emptied(byId("data"), (text) => current.feed.appendText(text));
});

byId("questioning").addEventListener("submit", (event) => {
  event.preventDefault();
  emptied(byId("about"), async (text) => {
    current.asks.ask(text.trim());
    return true;
  });
});

byId("keep").addEventListener("click", () => {
  if (!byId("questioning").reportValidity()) return;
  const answers = byId("choices").value.split(",").map((each) => each.trim()).filter(Boolean);
  emptied(byId("about"), async (text) => {
    const isKept = await current.watch(text.trim(), answers);
    if (isKept) byId("choices").value = "";
    return isKept;
  });
});

byId("end").addEventListener("click", () => current.end());

byId("file").addEventListener("change", (event) => {
  const [file] = event.target.files;
  event.target.value = "";
  if (file) current.feed.appendFile(file);
});

for (const name of ["dragover", "drop"]) {
  document.addEventListener(name, (event) => {
    if (byId("session").hidden || !event.dataTransfer.types.includes("Files")) return;
    event.preventDefault(); // prevents the browser from opening the file
    const [file] = event.dataTransfer.files;
    if (name === "drop" && file && current) current.feed.appendFile(file);
  });
}

sends(byId("data"));
sends(byId("about"));

function show() {
  const isSession = location.hash === "#session";
  byId("session").hidden = !isSession;
  byId("asking").hidden = byId("composer").hidden = isSession;
  document.body.classList.toggle("session", isSession);
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === "#session" === isSession) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (!isSession) {
    byId("question").focus();
    return;
  }
  const id = kept.get();
  if (!current && id) enter(id);
  else byId(current ? "data" : "system").focus();
}

addEventListener("hashchange", show);
show();
