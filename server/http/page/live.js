// The server's counts, read every other second, as differences between two answers.

import { call } from "./api.js";

const EVERY_MS = 2000;
const KEPT = 60;
/** Intervals per sample: with one alone, every prompt that is read would show. */
const OVER = 2;

/** onUpdate: called with the samples so far, the oldest first, and the latest answer; or with an Error. */
export function startLive(onUpdate) {
  let answers = [];
  let samples = [];

  async function look() {
    if (!document.hidden) {
      try {
        const now = await (await call("/outrider/live")).json();
        if (now.steps < answers.at(-1)?.steps) answers = []; // the server was restarted
        if (answers.length) samples = [...samples, between(answers[0], now)].slice(-KEPT);
        answers = [...answers, now].slice(-OVER);
        onUpdate(samples, now);
      } catch (error) {
        answers = [];
        onUpdate(error);
      }
    } else {
      answers = [];
    }
    setTimeout(look, EVERY_MS);
  }

  look();
}

const ratio = (up, down) => (down > 0 ? up / down : null);

/** Returns the rates between two answers of the server; null where there were no events. */
export function between(a, b) {
  const more = (name) => b[name] - a[name];
  const steps = more("steps");
  const step = ratio(more("step_seconds"), more("timed_steps"));
  const length = ratio(more("tokens"), more("request_steps"));
  const source = (...names) => {
    const of = (count) => names.reduce((sum, name) => sum + b.sources[name][count] - a.sources[name][count], 0);
    const brought = ratio(of("accepted"), of("drafts"));
    return brought === null ? null : 1 + brought;
  };
  const met = b.levels.met - a.levels.met;
  const predictable = more("predictable_seconds");
  return {
    time: b.time,
    throughput: more("tokens") / (b.time - a.time),
    user: step && length ? length / step : null,
    length,
    model: source("model"),
    lookup: source("lookup", "across"),
    grammar: source("grammar"),
    budget: steps ? more("budget") / steps : null,
    verified: steps ? more("verified") / steps : null,
    wasted: steps ? more("wasted") / steps : null,
    predicted: predictable > 0 && step ? 1000 * step * (more("predicted_seconds") / predictable) : null,
    taken: step && 1000 * step,
    chunk: more("chunks") ? (1000 * more("chunk_seconds")) / more("chunks") : null,
    error: ratio(more("error_seconds"), predictable),
    running: b.requests.running,
    queued: b.requests.queued,
    met,
    finished: met + b.levels.missed - a.levels.missed,
  };
}
