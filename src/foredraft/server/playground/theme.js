// Light or dark: as the system says, unless the reader chose. Loaded before the first paint, so that nothing flashes.

const KEY = "foredraft-theme";

function stored() {
  try {
    return localStorage.getItem(KEY) ?? "";
  } catch {
    return ""; // storage can be forbidden; the page then follows the system
  }
}

function apply(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

/** Make `select` show and change the theme. */
export function connectTheme(select) {
  select.value = stored();
  select.addEventListener("change", () => {
    apply(select.value);
    try {
      localStorage.setItem(KEY, select.value);
    } catch {
      // as above: the choice then lasts as long as the page
    }
  });
}

apply(stored());
