// Light, dark, or as the system.

const KEPT = "outrider-theme";
const ORDER = ["auto", "light", "dark"];

/** changed: called whenever the colours change. */
export function startTheme(button, changed) {
  const show = (theme) => {
    document.documentElement.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
    changed();
  };
  const now = () => document.documentElement.dataset.theme;
  const kept = localStorage.getItem(KEPT);
  show(ORDER.includes(kept) ? kept : "auto");
  button.addEventListener("click", () => {
    const next = ORDER[(ORDER.indexOf(now()) + 1) % ORDER.length];
    localStorage.setItem(KEPT, next);
    show(next);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
}
