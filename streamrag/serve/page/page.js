// A conversation with the service: each question becomes a turn, with its answer, its passages and its timeline.

import { Answer } from "./answer.js";
import { Flow } from "./flow.js";
import { Passages } from "./passages.js";
import { Refused, ask, inWords } from "./stream.js";
import { element, isStill, plain } from "./text.js";

const LONGEST_PAUSE_MS = 10_000; // between looks at whether the service is back

const byId = (id) => document.getElementById(id);
const conversation = byId("conversation");
const composer = byId("composer");
const field = byId("question");
const send = byId("send");
const spoken = byId("spoken");

// ------------------------------------------------------------------------------------------------------------ the key

const key = {
  value: null,
  get() {
    try {
      return sessionStorage.getItem("streamrag.key");
    } catch {
      return this.value; // storage is switched off
    }
  },
  set(value) {
    this.value = value;
    try {
      if (value === null) sessionStorage.removeItem("streamrag.key");
      else sessionStorage.setItem("streamrag.key", value);
    } catch {
      // it is kept until the page is left
    }
    byId("forget").hidden = value === null;
  },
};

// ------------------------------------------------------------------------------------------------------------ a turn

let numTurns = 0;

class Turn {
  constructor(question) {
    this.question = question;
    this.id = `t${++numTurns}`;
    this.aborter = new AbortController();
    this.isOver = false; // the service has said its last word
    this.isAnswered = false;
    this.hasBegun = false; // there is something to be seen of it
    this.node = byId("turn").content.firstElementChild.cloneNode(true);
    this._state = this.node.querySelector(".state");
    this._after = this.node.querySelector(".after");
    this._fold = this.node.querySelector(".fold");
    this.node.id = this.id;
    const head = this.node.querySelector("h2");
    head.textContent = plain(question);
    head.id = `${this.id}-question`;
    this.node.setAttribute("aria-labelledby", head.id);
    const section = this.node.querySelector(".passages");
    section.setAttribute("aria-label", "Passages");
    this.node.querySelector(".flow").setAttribute("aria-label", "Timeline");
    this._fold.addEventListener("click", () => this.fold(!this.node.classList.contains("folded")));
    this.passages = new Passages(section, this.id, () => this.fold(false));
    this.answer = new Answer(this.node.querySelector(".text"), this.passages, spoken);
    this.flow = new Flow(this.node.querySelector(".flow"));
    this.tell("Asking");
  }

  // What the model is told of it later on.
  get history() {
    if (!this.answer.text.trim()) return [];
    return [
      { role: "user", content: this.question },
      { role: "assistant", content: this.answer.text },
    ];
  }

  tell(state) {
    this._state.textContent = state;
  }

  // Hides all but question and answer.
  fold(isFolded) {
    this.node.classList.toggle("folded", isFolded);
    this._fold.textContent = `${isFolded ? "Show" : "Hide"} passages and timeline`;
    this._fold.hidden = !this.hasBegun;
  }

  event(name, values) {
    if (name === "error") {
      this.isOver = true;
      this.end();
      this.fail(plain(inWords(values.error)), { again: true });
      return;
    }
    this.hasBegun = true;
    this.flow.event(name, values);
    switch (name) {
      case "retrieval_started":
        this.tell("Retrieving");
        break;
      case "chunk_arrived":
        this.passages.arrived(values.chunk);
        break;
      case "context_changed":
        if (values.chunks) this.passages.order(values.chunks);
        break;
      case "document_skipped":
        this.passages.note(`Skipped ${values.uri}: ${values.reason}`);
        break;
      case "retrieval_cut_short":
        this.passages.note(`Retrieval ended early: ${values.reason}`);
        break;
      case "source_failed":
        this.passages.note(`Retrieval failed, the answer is made of what had arrived: ${values.error}`);
        break;
      case "chunks_shortened":
        this.passages.note(`Shortened to fit ${values.max_context_tokens} tokens: ${values.chunks.length}`);
        break;
      case "context_complete":
        this.passages.order(values.chunks, { isComplete: true });
        this.tell("Reading");
        say(`${values.num_chunks} passages`);
        break;
      case "tokens_generated":
        if (!values.text) break;
        this.tell("");
        this.answer.add(values.text);
        break;
      case "answered":
        this.isOver = this.isAnswered = true;
        this.end();
        if (values.answer.finish_reason === "length") this._after.append(element("p", "note", "Cut off at its limit of tokens."));
        if (!this.answer.text.trim()) this.tell("The model said nothing.");
    }
  }

  // Nothing more will come.
  end() {
    this.flow.stop();
    this.answer.finish();
    this.tell("");
    if (!this.hasBegun) this.fold(true);
  }

  // message: what went wrong. again: whether asking again may help; waitS: when, at the earliest.
  fail(message, { again = false, waitS = null } = {}) {
    this.end();
    const box = element("div", "failure");
    const words = element("p", "", message);
    words.setAttribute("role", "alert");
    box.append(words);
    this._after.append(box);
    if (!again) return { words, button: null };
    const button = element("button", "again", "Ask again");
    button.type = "button";
    button.addEventListener("click", () => begin(this.question, this));
    box.append(button);
    if (waitS) countDown(button, waitS);
    return { words, button };
  }

  askForKey(wasRefused) {
    this.end();
    const form = element("form", "failure key");
    const label = element("label", "", "API key");
    const input = element("input");
    input.type = "password";
    input.autocomplete = "off";
    input.required = true;
    input.id = label.htmlFor = `${this.id}-key`;
    const words = element("p", "", wasRefused ? "The service does not accept this key." : "The service wants an API key.");
    words.setAttribute("role", "alert");
    form.append(words, label, input, element("button", "", "Use this key"));
    input.addEventListener("input", () => input.setCustomValidity(""));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const given = input.value.trim();
      if (!/^[\x21-\x7e]+$/.test(given)) {
        input.setCustomValidity("A key has only letters, digits and signs of ASCII.");
        input.reportValidity();
        return;
      }
      key.set(given);
      begin(this.question, this);
    });
    this._after.append(form);
    input.focus();
  }
}

function say(text) {
  spoken.append(element("p", "", text));
}

function countDown(button, waitS) {
  const endMs = performance.now() + 1000 * waitS;
  button.disabled = true;
  const look = () => {
    const leftS = Math.ceil((endMs - performance.now()) / 1000);
    button.disabled = leftS > 0;
    button.textContent = leftS > 0 ? `Ask again in ${leftS} s` : "Ask again";
    if (leftS > 0 && button.isConnected) setTimeout(look, 250);
  };
  look();
}

// Looks now and then whether the service is back, for as long as the turn is shown.
async function waitUntilBack(turn, words, button) {
  button.disabled = true;
  for (let pauseMs = 500; turn.node.isConnected; pauseMs = Math.min(2 * pauseMs, LONGEST_PAUSE_MS)) {
    await new Promise((resolve) => setTimeout(resolve, pauseMs));
    try {
      if (!(await fetch("readyz", { cache: "no-store" })).ok) continue;
    } catch {
      continue; // still gone
    }
    words.textContent = "The service is back.";
    button.disabled = false;
    return;
  }
}

// ---------------------------------------------------------------------------------------------------- the conversation

let turns = [];
let current = null; // the turn that is being answered

// instead: a turn that failed, whose place the new one takes.
async function begin(question, instead = null) {
  if (current) return;
  const at = instead ? turns.indexOf(instead) : turns.length;
  const history = turns.slice(0, at).flatMap((turn) => turn.history);
  const turn = (current = new Turn(question));
  for (const each of turns) if (each !== instead) each.fold(true);
  byId("welcome").hidden = true;
  byId("afresh").hidden = false;
  spoken.replaceChildren();
  if (instead) instead.node.replaceWith(turn.node);
  else conversation.append(turn.node);
  turns.splice(at, instead ? 1 : 0, turn);
  turn.node.scrollIntoView({ block: "start", behavior: isStill() ? "auto" : "smooth" });
  show(true);
  const given = key.get();
  try {
    for await (const { name, values } of ask({ question, history }, given, turn.aborter.signal)) turn.event(name, values);
    if (!turn.isOver) throw new TypeError("the stream ended early");
  } catch (error) {
    if (!turn.isOver) failed(turn, error, given);
  } finally {
    if (current === turn) {
      current = null;
      show(false);
    }
    if (turn.isAnswered) say("End of the answer");
  }
}

function failed(turn, error, given) {
  if (turn.aborter.signal.aborted) {
    turn.fail("Stopped.", { again: true });
  } else if (error instanceof Refused && error.status === 401) {
    key.set(null);
    turn.askForKey(given !== null);
  } else if (error instanceof Refused) {
    const mayWork = error.status >= 429 || error.status === 408;
    turn.fail(plain(error.message), { again: mayWork, waitS: error.waitS });
  } else if (error instanceof TypeError) {
    const gone = turn.answer.text ? "The connection broke before the answer was complete." : "The service cannot be reached.";
    const { words, button } = turn.fail(gone, { again: true });
    waitUntilBack(turn, words, button);
  } else {
    turn.fail("The service sent something that this page does not understand.", { again: true });
    throw error;
  }
}

function show(isBusy) {
  send.textContent = isBusy ? "Stop" : "Ask";
  send.classList.toggle("stop", isBusy);
  field.placeholder = turns.length ? "Ask a follow-up question" : "Ask a question";
  field.required = !isBusy;
}

function stop() {
  current?.aborter.abort();
}

composer.addEventListener("submit", (event) => {
  event.preventDefault();
  const question = field.value.trim();
  if (current || !question) return;
  field.value = "";
  begin(question);
});

send.addEventListener("click", (event) => {
  if (!current) return;
  event.preventDefault();
  if (event.detail < 2) stop(); // the second of a double click on "Ask" means nothing
});

field.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    composer.requestSubmit();
  }
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});

byId("forget").addEventListener("click", () => {
  key.set(null);
  field.focus();
});

byId("afresh").addEventListener("click", () => {
  stop();
  current = null;
  turns = [];
  conversation.replaceChildren();
  spoken.replaceChildren();
  byId("welcome").hidden = false;
  byId("afresh").hidden = true;
  show(false);
  field.focus();
});

key.set(key.get());
field.focus();
