"use strict";
(() => {
  // Theme: the system's, until the button is pressed.
  const root = document.documentElement;
  const remembered = (() => { try { return localStorage.getItem("mosar-theme"); } catch { return null; } })();
  if (remembered) root.dataset.theme = remembered;
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    try { localStorage.setItem("mosar-theme", root.dataset.theme); } catch { /* a page without storage forgets */ }
  });
})();
