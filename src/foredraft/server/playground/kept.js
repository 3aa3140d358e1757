// Settings that outlast a reload, as long as the tab is open.

const KEY = "foredraft-settings";

/** What was kept: values by the id of their control; nothing where nothing was. */
export function restored() {
  try {
    return JSON.parse(sessionStorage.getItem(KEY)) ?? {};
  } catch {
    return {}; // storage can be forbidden, and hold anything
  }
}

/** Keep these values in place of the former ones. */
export function keep(values) {
  try {
    sessionStorage.setItem(KEY, JSON.stringify(values));
  } catch {
    // as above: they then last as long as the page
  }
}
