// The API key, stored until the tab is closed or the key is forgotten.

import { element } from "./text.js";

const NAME = "streamrag.key";

let kept = null; // used where storage is disabled, until the page is left

export const key = {
  get() {
    try {
      return sessionStorage.getItem(NAME);
    } catch {
      return kept;
    }
  },
  set(value) {
    kept = value;
    try {
      if (value === null) sessionStorage.removeItem(NAME);
      else sessionStorage.setItem(NAME, value);
    } catch {
      // storage is disabled
    }
    document.getElementById("forget").hidden = value === null;
  },
};

// Appends a form for the key to `place`; calls `then` once there is a key.
export function askForKey(place, id, wasRefused, then) {
  const form = element("form", "failure key");
  const label = element("label", "", "API key");
  const input = element("input");
  input.type = "password";
  input.autocomplete = "off";
  input.required = true;
  input.id = label.htmlFor = id;
  const why = wasRefused ? "The service does not accept this key." : "The service requires an API key.";
  const words = element("p", "", why);
  words.setAttribute("role", "alert");
  form.append(words, label, input, element("button", "", "Use this key"));
  input.addEventListener("input", () => input.setCustomValidity(""));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const given = input.value.trim();
    if (!/^[\x21-\x7e]+$/.test(given)) {
      input.setCustomValidity("A key has only printable ASCII characters.");
      input.reportValidity();
      return;
    }
    key.set(given);
    then();
  });
  place.append(form);
  input.focus();
}
