// The API key: kept in this tab, until it is closed or the key is forgotten.

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
