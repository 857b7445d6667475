// A conversation with the service: each question becomes a turn, with its answer, its passages and its timeline.

import { key } from "./key.js";
import { Listener } from "./listen.js";
import { Gone, Refused, ask } from "./stream.js";
import { isStill, plain } from "./text.js";
import { Turn } from "./turn.js";

const LONGEST_PAUSE_MS = 10_000; // maximum time between two checks whether the service is back

const byId = (id) => document.getElementById(id);
const conversation = byId("conversation");
const composer = byId("composer");
const field = byId("question");
const send = byId("send");
const spoken = byId("spoken");

const listener = composer.dataset.listens === "yes" ? new Listener(showAhead) : null;

let turns = [];
let current = null; // the turn in progress

// instead: a failed turn that the new one replaces.
async function begin(question, instead = null) {
  if (current) return;
  const at = instead ? turns.indexOf(instead) : turns.length;
  const history = historyOf(turns.slice(0, at));
  const turn = (current = new Turn(question, (failed) => begin(failed.question, failed), spoken));
  for (const each of turns) if (each !== instead) each.fold(true);
  byId("welcome").hidden = true;
  byId("afresh").hidden = false;
  spoken.replaceChildren();
  const hadFocus = instead?.node.contains(document.activeElement);
  if (instead) instead.node.replaceWith(turn.node);
  else conversation.append(turn.node);
  if (hadFocus) field.focus({ preventScroll: true });
  turns.splice(at, instead ? 1 : 0, turn);
  turn.node.scrollIntoView({ block: "start", behavior: isStill() ? "auto" : "smooth" });
  show(true);
  const given = key.get();
  try {
    if (instead) listener?.drop(); // its history may be another
    const { signal } = turn.aborter;
    const asked = listener?.ask(question, signal, (name, values) => turn.event(name, values));
    if (asked) await asked;
    else for await (const { name, values } of ask({ question, history }, given, signal)) turn.event(name, values);
    if (!turn.isOver) throw new Gone("the stream ended early");
  } catch (error) {
    if (!turn.isOver) failed(turn, error, given);
  } finally {
    if (current === turn) {
      current = null;
      show(false);
      listen();
    }
    if (turn.isAnswered) turn.say("End of the answer");
  }
}

const historyOf = (some) => some.flatMap((turn) => turn.history);

function listen() {
  if (!current) listener?.type(field.value.trim(), historyOf(turns));
}

// titles: those of passages found for what is typed, or null.
function showAhead(titles) {
  const found = [...new Set(titles ?? [])].map(plain);
  byId("ahead").textContent = titles && (found.length ? `Found so far: ${found.join(", ")}` : "Searching …");
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
  } else if (error instanceof Gone) {
    const broke = "The connection broke before the answer was complete.";
    const { words, button } = turn.fail(turn.hasBegun ? broke : "The service cannot be reached.", { again: true });
    waitUntilBack(turn, words, button);
  } else {
    turn.fail("The service sent something that this page does not understand.", { again: true });
    throw error;
  }
}

// Polls whether the service is back, for as long as the turn is displayed.
async function waitUntilBack(turn, words, button) {
  button.disabled = true;
  for (let pauseMs = 500; turn.node.isConnected; pauseMs = Math.min(2 * pauseMs, LONGEST_PAUSE_MS)) {
    await new Promise((resolve) => setTimeout(resolve, pauseMs));
    try {
      if (!(await fetch("readyz", { cache: "no-store" })).ok) continue;
    } catch {
      continue; // still unreachable
    }
    words.textContent = "The service is back.";
    button.disabled = false;
    return;
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
  if (event.detail < 2) stop(); // ignores the second click of a double click on "Ask"
});

field.addEventListener("input", listen);

field.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    composer.requestSubmit();
  }
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !composer.hidden) stop();
});

byId("forget").addEventListener("click", () => {
  key.set(null);
  listen();
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
  listener?.drop();
  field.focus();
});

key.set(key.get());
field.focus();
