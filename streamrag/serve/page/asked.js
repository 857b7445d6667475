// Questions to a session: those that are answered once, and watched ones.

import { Refused, inWords } from "./stream.js";
import { count, element, plain, seconds } from "./text.js";

const MOST_ASKS = 50; // maximum questions that are displayed

const ago = (s) => {
  if (s < 60) return `${Math.floor(s)} s ago`;
  if (s < 3600) return `${Math.floor(s / 60)} min ago`;
  return `${Math.floor(s / 3600)} h ago`;
};

// One question with its newest answer and its state.
class Question {
  constructor(question) {
    this.node = element("li", "question waiting");
    this._text = element("p", "text");
    this._text.dir = "auto";
    this._about = element("p", "about");
    this.stop = element("button", "quiet", "Stop");
    this.stop.type = "button";
    const head = element("header");
    this._head = element("h4");
    this._head.dir = "auto";
    head.append(this._head, this.stop);
    this.node.append(head, this._text, this._about);
    this.ask(question);
  }

  ask(question) {
    this._head.textContent = plain(question);
    this.stop.setAttribute("aria-label", `Stop: ${plain(question)}`);
  }

  put(text) {
    this._text.textContent = text;
  }

  tell(...parts) {
    this._about.replaceChildren(...parts);
  }

  fail(words) {
    this.node.classList.add("failed");
    this.tell(words);
  }
}

export class Asks {
  // changed: called with the number of open questions. tokensAt: returns the tokens of a version, if known.
  constructor(list, session, { changed, tokensAt, say }) {
    this._list = list;
    this._session = session;
    this._changed = changed;
    this._tokensAt = tokensAt;
    this._say = say;
    this._numOpen = 0;
    list.replaceChildren();
  }

  ask(question) {
    const asked = new Question(question);
    const beganMs = performance.now();
    let text = "";
    let firstS = null;
    let frame = 0;
    const draw = () => {
      frame = 0;
      asked.put(plain(text));
    };
    const end = () => {
      cancelAnimationFrame(frame);
      draw();
      asked.stop.remove();
      asked.node.classList.remove("waiting");
      this._count(-1);
    };
    asked.tell("Waiting");
    this._list.prepend(asked.node);
    this._count(1);
    const id = this._session.ask(question, {
      tokens_generated: (values) => {
        text += values.text;
        if (firstS === null) asked.tell("Answering");
        firstS ??= (performance.now() - beganMs) / 1000;
        frame ||= requestAnimationFrame(draw);
      },
      answered: ({ answer }) => {
        end();
        asked.put(plain(answer.text) || "The model said nothing.");
        asked.tell(this._about(answer, firstS));
        this._say(`${plain(question)} ${plain(answer.text)}`);
      },
      cancelled: () => {
        end();
        asked.fail("Stopped.");
      },
      failed: (error) => {
        end();
        asked.fail(error instanceof Refused ? plain(error.message) : "The connection broke before the answer.");
      },
    });
    asked.stop.addEventListener("click", () => this._session.cancel(id));
    const old = [...this._list.children].slice(MOST_ASKS).filter((node) => !node.classList.contains("waiting"));
    for (const node of old) node.remove();
  }

  _count(by) {
    this._numOpen += by;
    this._changed(this._numOpen);
  }

  _about(answer, firstS) {
    const data = this._tokensAt(answer.version);
    const own = data === undefined || answer.unit !== "tokens" ? "" : `, ${count(answer.num_prompt_tokens - data)} tokens of its own`;
    const first = firstS === null ? "" : `, first token after ${seconds(firstS)}`;
    return `version ${count(answer.version)}${own}${first}`;
  }
}

export class Watches {
  // dropped: called with the name of a watch to remove.
  constructor(list, { dropped, say }) {
    this._list = list;
    this._dropped = dropped;
    this._say = say;
    this._all = new Map(); // by name
    list.replaceChildren();
    this._timer = setInterval(() => this._tick(), 1000);
  }

  leave() {
    clearInterval(this._timer);
  }

  add(name, question) {
    let watch = this._all.get(name);
    if (!watch) {
      watch = new Question(question);
      watch.tell("Waiting for its first answer");
      watch.stop.addEventListener("click", () => this._dropped(name));
      this._all.set(name, watch);
      this._list.append(watch.node);
    }
    return watch;
  }

  remove(name) {
    this._all.get(name)?.node.remove();
    this._all.delete(name);
  }

  // questions: the watched questions of the session, by name.
  keep(questions) {
    for (const name of [...this._all.keys()].filter((each) => !Object.hasOwn(questions, each))) this.remove(name);
    for (const [name, question] of Object.entries(questions)) this.add(name, question);
  }

  ready({ name, question, answer, version, age_s: ageS }) {
    const watch = this.add(name, question);
    watch.ask(question);
    watch.put(plain(answer) || "The model said nothing.");
    watch.node.classList.remove("waiting", "failed");
    watch.sinceMs = performance.now() - 1000 * ageS;
    watch.version = version;
    this._draw(watch);
    if (ageS < 5) this._say(`${plain(question)} ${plain(answer)}`);
  }

  failed({ name, question, error }) {
    const watch = this.add(name, question);
    watch.ask(question);
    watch.sinceMs = undefined;
    watch.node.classList.remove("waiting");
    watch.fail(plain(inWords(error)));
  }

  _tick() {
    for (const watch of this._all.values()) if (watch.sinceMs !== undefined) this._draw(watch);
  }

  _draw(watch) {
    const ageS = (performance.now() - watch.sinceMs) / 1000;
    watch.tell(`since version ${count(watch.version)}, ${ago(ageS)}`);
  }
}
