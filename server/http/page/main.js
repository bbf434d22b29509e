import { Charts } from "./charts.js";
import { byId } from "./dom.js";
import { startLive } from "./live.js";
import { startPlayground } from "./playground.js";
import { startTheme } from "./theme.js";

const charts = new Charts(byId("charts"));
startTheme(byId("theme"), () => charts.recolour());
startPlayground();
startLive((samples, now) => {
  const state = byId("state");
  const lost = samples instanceof Error;
  const words = lost ? `no answer: ${samples.message}` : "ready";
  if (state.textContent !== words) state.textContent = words; // screen readers read it aloud
  state.dataset.state = lost ? "lost" : "ready";
  if (lost) return;
  const engines = now.engines > 1 ? ` · ${now.engines} engines` : "";
  const speculation = now.drafter === "off" ? "no speculation" : `${now.drafter} drafts · ${now.planner} planner`;
  byId("about").textContent = `${now.model} · ${speculation}${engines}`;
  const { running, queued } = now.requests;
  byId("totals").textContent =
    `${running} running · ${queued} queued · cache ${Math.round((100 * now.cache.used) / now.cache.size)} % of ${now.cache.size} tokens`;
  charts.show(samples, now);
});
