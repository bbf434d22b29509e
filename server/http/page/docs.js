// The description of the API, drawn by Swagger UI: light or dark as chosen on the page at /, or as the system.

const kept = localStorage.getItem("outrider-theme");
const system = matchMedia("(prefers-color-scheme: dark)");
const show = () =>
  document.documentElement.classList.toggle("dark-mode", kept === "dark" || (kept !== "light" && system.matches));
system.addEventListener("change", show);
show();

window.SwaggerUIBundle({ url: "/openapi.json", dom_id: "#docs", deepLinking: true, tryItOutEnabled: true });
