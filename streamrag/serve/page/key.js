// The API key: kept in this tab, until it is closed or the key is forgotten.

import { element } from "./text.js";

const NAME = "streamrag.key";

let kept = null; // where storage is switched off: until the page is left

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
      // it is kept here
    }
    document.getElementById("forget").hidden = value === null;
  },
};

// A form for it at the end of `place`; `then` is called once there is one.
export function askForKey(place, id, wasRefused, then) {
  const form = element("form", "failure key");
  const label = element("label", "", "API key");
  const input = element("input");
  input.type = "password";
  input.autocomplete = "off";
  input.required = true;
  input.id = label.htmlFor = id;
  const why = wasRefused ? "The service does not accept this key." : "The service wants an API key.";
  const words = element("p", "", why);
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
    then();
  });
  place.append(form);
  input.focus();
}
