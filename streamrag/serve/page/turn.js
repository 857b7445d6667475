// One question with its answer, passages and timeline.

import { Answer } from "./answer.js";
import { Flow } from "./flow.js";
import { askForKey } from "./key.js";
import { Passages } from "./passages.js";
import { inWords } from "./stream.js";
import { element, plain } from "./text.js";

let numTurns = 0;

export class Turn {
  // again: called with the turn to retry its question. spoken: the live region for screen readers.
  constructor(question, again, spoken) {
    this.question = question;
    this._again = again;
    this._spoken = spoken;
    this.id = `t${++numTurns}`;
    this.aborter = new AbortController();
    this.isOver = false; // the query has ended
    this.isAnswered = false;
    this._context = []; // passages of the newest prompt, in prompt order
    this.hasBegun = false; // an event was received
    this.node = document.getElementById("turn").content.firstElementChild.cloneNode(true);
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

  // The messages of this turn, for the history of later ones.
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

  say(text) {
    this._spoken.append(element("p", "", text));
  }

  // Hides everything except the question and the answer.
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
        this._context.splice(values.splice.at, values.splice.num_removed, ...values.splice.chunks);
        this.passages.order(this._context);
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
        this.say(`${values.num_chunks} ${values.num_chunks === 1 ? "passage" : "passages"}`);
        break;
      case "draft_changed":
        this.tell("Drafting");
        this.answer.draft(values.text);
        break;
      case "tokens_generated":
        if (!values.text) break;
        this.tell("");
        this.answer.add(values.text);
        break;
      case "answered":
        this.isOver = this.isAnswered = true;
        this.end();
        if (values.answer.finish_reason === "length") {
          this._after.append(element("p", "note", "Cut off at its limit of tokens."));
        }
        if (!this.answer.text.trim()) this.tell("The model said nothing.");
    }
  }

  // Marks the end of the turn.
  end() {
    this.flow.stop();
    this.passages.finish();
    this.answer.finish();
    this.tell("");
    if (!this.hasBegun) this.fold(true);
  }

  // message: the error. again: whether to offer a retry. waitS: seconds until it is possible.
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
    button.addEventListener("click", () => this._again(this));
    box.append(button);
    if (waitS) countDown(button, waitS);
    return { words, button };
  }

  askForKey(wasRefused) {
    this.end();
    askForKey(this._after, `${this.id}-key`, wasRefused, () => this._again(this));
  }
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
