// The three regions of a session's prompt: the frozen system text, the sliding data, and the questions.

import { count, element } from "./text.js";

const MOST_QUESTIONS = 12; // maximum questions that are drawn

export class Regions {
  constructor(section) {
    this._parts = Object.fromEntries(
      ["frozen", "sliding", "free"].map((name) => [name, section.querySelector(`.picture .${name}`)]),
    );
    this._questions = section.querySelector(".picture .ephemeral");
    this._stands = section.querySelector(".stands");
    this._said = Object.fromEntries(
      [...section.querySelectorAll("dl div")].map((each) => [each.className, each.querySelector("dd")]),
    );
  }

  // Draws the state of a session.
  draw(state) {
    const frozen = state.num_frozen_tokens;
    const sliding = state.num_tokens - frozen;
    const tokens = { frozen, sliding, free: Math.max(state.window_tokens - sliding, 0) };
    for (const [name, num] of Object.entries(tokens)) {
      this._parts[name].style.flexGrow = String(num);
      this._parts[name].hidden = num === 0;
      this._said[name].textContent = count(num);
    }
    this._stands.textContent = `${count(state.num_tokens)} tokens, version ${count(state.version)}`;
    this._said.waiting.textContent = count(state.num_waiting);
    this._said.slid.textContent = count(state.num_slid);
    this._said.dropped.textContent = count(state.num_dropped);
    this._said.dropped.parentNode.classList.toggle("some", state.num_dropped > 0);
  }

  drawQuestions(numOpen) {
    this._said.ephemeral.textContent = `${count(numOpen)} open`;
    const blocks = Array.from({ length: Math.min(numOpen, MOST_QUESTIONS) }, () => element("i"));
    this._questions.replaceChildren(...blocks);
  }
}
