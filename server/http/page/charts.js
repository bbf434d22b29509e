// Eight small charts of the server's work, and one of its learning: each a caption in words and numbers, and a plot of
// the same.

import { element } from "./dom.js";
import uPlot from "./vendor/uPlot.esm.js";

const round = (digits) => (value) => value.toFixed(digits);
const percent = (value) => `${Math.round(100 * value)} %`;
const LINES = [
  {
    title: "Throughput, tokens per second",
    series: [
      { name: "throughput", label: "all", colour: "target", show: round(1) },
      { name: "user", label: "per user", colour: "model", dashed: true, show: round(1) },
    ],
  },
  {
    title: "Accepted length, tokens per step",
    ofBlocks: "Tokens per forward and block",
    series: [
      { name: "length", label: "all", colour: "target", show: round(2) },
      { name: "model", label: "where drafted", colour: "model", dashed: true, show: round(2) },
      { name: "lookup", label: "where looked up", colour: "lookup", show: round(2) },
      { name: "grammar", label: "where a grammar forces text", colour: "good", show: round(2) },
    ],
  },
  {
    title: "Draft tokens per step, all requests",
    ofBlocks: "Draft states per forward, all blocks",
    series: [
      { name: "budget", label: "budget", colour: "target", dashed: true, show: round(1) },
      { name: "verified", label: "verified", colour: "model", show: round(1) },
      { name: "wasted", label: "wasted", colour: "warn", show: round(1) },
    ],
  },
  {
    title: "Step time, ms",
    series: [
      { name: "predicted", label: "predicted", colour: "model", dashed: true, show: round(1) },
      { name: "taken", label: "taken", colour: "target", show: round(1) },
      { name: "chunk", label: "chunk of a prompt", colour: "lookup", show: round(1) },
    ],
    more: { name: "error", label: "off by", show: percent },
  },
  {
    title: "Requests",
    series: [
      { name: "running", label: "running", colour: "target", show: round(0) },
      { name: "queued", label: "queued", colour: "warn", dashed: true, show: round(0) },
    ],
    whole: true,
  },
];

/** All charts, in `parent`. */
export class Charts {
  constructor(parent) {
    this.parent = parent;
    this.charts = [
      ...LINES.slice(0, 3).map((about) => new Lines(parent, about)),
      new Throughput(parent),
      ...LINES.slice(3).map((about) => new Lines(parent, about)),
      new Calibration(parent),
      new Levels(parent),
    ];
  }

  /** samples: see `between` in live.js. now: the server's latest answer. */
  show(samples, now) {
    if (now.learning && !this.learning) this.charts.push((this.learning = new Learning(this.parent)));
    for (const chart of this.charts) chart.show(samples, now);
  }

  recolour() {
    for (const chart of this.charts) chart.recolour();
  }
}

const said = (value, show) => (value === null || value === undefined ? "–" : show(value));

/** A figure with one plot. Subclasses define its series and set its data. extra: label of a further value. */
class Chart {
  constructor(parent, title, series, scales, extra) {
    this.series = series;
    this.scales = scales;
    this.data = [[], ...series.map(() => [])];
    this.plotted = element("div", { className: "plot" });
    this.plotted.setAttribute("aria-hidden", "true"); // the caption says the same
    this.values = series.map(() => element("b", { textContent: "–" }));
    const labels = series.map((about, index) =>
      element("span", { className: "value" }, [
        element("i", { className: `c-${about.colour}${about.dashed ? " dashed" : ""}${about.dot ? " dot" : ""}` }),
        `${about.label} `,
        this.values[index],
      ]),
    );
    this.caption = element("figcaption", {}, [element("h3", { textContent: title }), ...labels]);
    this.extra = element("b", { textContent: "–" });
    if (extra) this.caption.append(element("span", { className: "value" }, [`${extra} `, this.extra]));
    this.figure = element("figure", { className: "chart empty" }, [this.caption, this.plotted]);
    parent.append(this.figure);
    new ResizeObserver(() => this.#resize()).observe(this.plotted);
  }

  plot(data) {
    this.data = data;
    this.figure.classList.toggle("empty", !data.slice(1).some((values) => values.some((value) => value !== null)));
    this.drawn?.setData(data);
    this.tell(this.drawn?.cursor.idx ?? this.last);
  }

  /** The values at a place of the data, in the caption. */
  tell(index) {
    this.series.forEach((about, at) => {
      this.values[at].textContent = said(this.data[at + 1][index], about.show);
    });
  }

  recolour() {
    this.drawn?.destroy();
    this.drawn = null;
    this.#resize();
  }

  #resize() {
    const [width, height] = [this.plotted.clientWidth, this.plotted.clientHeight];
    if (width < 40 || height < 40) return;
    if (this.drawn) this.drawn.setSize({ width, height });
    else this.drawn = new uPlot(this.#options(width, height), this.data, this.plotted);
  }

  #options(width, height) {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`);
    const axis = {
      stroke: colour("soft"),
      font: "11px system-ui, sans-serif",
      grid: { stroke: colour("line"), width: 1 },
      ticks: { show: false },
      gap: 3,
    };
    return {
      width,
      height,
      padding: [6, 16, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 5 } },
      scales: { x: { time: false, ...this.scales?.x }, y: { range: fromZero, ...this.scales?.y } },
      axes: [
        { ...axis, size: 20, space: 50, ...this.scales?.xAxis },
        { ...axis, size: 40, space: 26, ...this.scales?.yAxis },
      ],
      series: [
        {},
        ...this.series.map((about) => ({
          stroke: colour(about.colour),
          width: about.dot ? 0 : 1.6,
          dash: about.dashed ? [5, 4] : undefined,
          spanGaps: about.spanGaps ?? false,
          points: about.dot
            ? { show: true, size: 9, fill: colour(about.colour), stroke: colour("panel"), width: 2 }
            : { show: about.points ?? false, size: 5, fill: colour(about.colour) },
        })),
      ],
      hooks: {
        setCursor: [(drawn) => this.tell(drawn.cursor.idx ?? this.last)],
        draw: [(drawn) => this.mark?.(drawn, colour)],
      },
    };
  }

  get last() {
    return this.data[0].length - 1;
  }
}

const fromZero = (_, __, most) => [0, most > 0 ? most * 1.12 : 1];
const percents = { values: (_, ticks) => ticks.map(percent) };
const minutes = {
  x: { range: [-120, 0] },
  xAxis: { splits: () => [-90, -60, -30, 0], values: (_, ticks) => ticks.map((s) => (s ? `${s} s` : "now")) },
};

/** Lines over the last minutes. */
class Lines extends Chart {
  constructor(parent, { title, ofBlocks, series, more, whole }) {
    const scales = { ...minutes, ...(whole && { yAxis: { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500] } }) };
    super(parent, title, series, scales, more?.label);
    this.more = more;
    this.ofBlocks = ofBlocks;
  }

  show(samples, now) {
    if (now.diffusion && this.ofBlocks) this.caption.querySelector("h3").textContent = this.ofBlocks;
    const column = (name) => samples.map((sample) => sample[name]);
    this.samples = samples;
    this.plot([column("time").map((time) => time - now.time), ...this.series.map(({ name }) => column(name))]);
  }

  tell(index) {
    super.tell(index);
    if (this.more) this.extra.textContent = said(this.samples?.[index]?.[this.more.name], this.more.show);
  }
}

/** The planner's expected speed of the current step by the number of verified draft tokens, and its choice. */
class Throughput extends Chart {
  constructor(parent) {
    super(
      parent,
      "Throughput Θ(K) by draft tokens verified",
      [
        { label: "expected", colour: "model", spanGaps: true, show: round(0) },
        { label: "planned", colour: "warn", dot: true, show: round(0) },
      ],
      { y: { range: around } },
      "K",
    );
    this.figure.classList.add("wide");
  }

  show(_, { curve }) {
    if (!curve) return;
    const [tokens, best] = curve.chosen;
    const data = uPlot.join([[curve.tokens, curve.throughput], [[tokens], [best]]]);
    this.chosen = data[0].indexOf(tokens);
    this.requests = curve.requests;
    this.plot(data);
  }

  tell(index) {
    super.tell(index ?? this.chosen);
    const planned = this.data[2][this.chosen];
    if ((index ?? this.chosen) === this.chosen && planned) this.values[0].textContent = round(0)(planned);
    this.values[1].textContent = planned ? round(0)(planned) : "–";
    const tokens = this.data[0][index ?? this.chosen];
    const of = this.requests > 1 ? ` of ${this.requests} requests` : "";
    this.extra.textContent = tokens === undefined ? "–" : `${Number(tokens.toFixed(1))}${of}`;
  }

  get last() {
    return this.chosen;
  }
}

const around = (_, least, most) => (most > 0 ? [Math.max(0, least - (most - least) * 0.3), most + (most - least || most) * 0.2] : [0, 1]);

/** How often drafted tokens were accepted, by how sure the drafter was of them, since the server's start. */
class Calibration extends Chart {
  constructor(parent) {
    const unit = { range: [0, 1] };
    super(
      parent,
      "Calibration: accepted, by confidence",
      [
        { label: "ideal", colour: "target", spanGaps: true, dashed: true, show: () => "" },
        { label: "drafted", name: "model", colour: "model", spanGaps: true, points: true, show: percent },
        { label: "looked up", name: "lookup", colour: "lookup", spanGaps: true, points: true, show: percent },
      ],
      { x: unit, y: unit, xAxis: percents, yAxis: percents },
    );
  }

  show(_, { calibration }) {
    const tables = [[[0, 1], [0, 1]]];
    this.errors = [null];
    for (const { name } of this.series.slice(1)) {
      const { observed, accepted, expected } = calibration[name];
      const seen = observed.map((count, bin) => bin).filter((bin) => observed[bin] > 0);
      const all = seen.reduce((sum, bin) => sum + observed[bin], 0);
      tables.push([seen.map((bin) => expected[bin] / observed[bin]), seen.map((bin) => accepted[bin] / observed[bin])]);
      this.errors.push(all ? seen.reduce((sum, bin) => sum + Math.abs(expected[bin] - accepted[bin]), 0) / all : null);
    }
    this.plot(uPlot.join(tables));
  }

  /** Without a place, the mean error of each. */
  tell(index) {
    if (index !== undefined && index !== null) return super.tell(index);
    this.values.forEach((value, at) => {
      const error = this.errors?.[at] ?? null;
      value.textContent = at === 0 ? "" : error === null ? "–" : `off by ${(100 * error).toFixed(1)} %`;
    });
  }

  get last() {
    return undefined;
  }
}

/** The share of requests that got the speed they required. */
class Levels extends Chart {
  constructor(parent) {
    const scales = { ...minutes, y: { range: [0, 1.05] }, yAxis: percents };
    const series = [{ label: "now", colour: "lookup", show: percent }];
    super(parent, "Service levels met, last minute", series, scales, "since the start");
    this.extra.textContent = "none asked for";
  }

  show(samples, { time, levels }) {
    const share = samples.map((_, last) => {
      const recent = samples.slice(Math.max(0, last - 30), last + 1);
      const sum = (name) => recent.reduce((total, sample) => total + sample[name], 0);
      return sum("finished") ? sum("met") / sum("finished") : null;
    });
    this.plot([samples.map((sample) => sample.time - time), share]);
    if (levels.met + levels.missed) this.extra.textContent = `${levels.met} met, ${levels.missed} missed`;
  }
}

const EXCHANGES = [
  { event: "promotion", label: "put to use", colour: "lookup" },
  { event: "rollback", label: "taken back", colour: "warn" },
];
const PHASES = {
  waiting: "waiting for answers",
  reading: "reading answers",
  training: "training",
  gate: "trying a candidate",
  failed: "failed, see the log",
};
const hour = {
  x: { range: [-60, 0] },
  xAxis: { splits: () => [-45, -30, -15, 0], values: (_, ticks) => ticks.map((minute) => (minute ? `${minute} min` : "now")) },
};
const POINT_SECONDS = 10;

/** Tokens per step since the page was opened, with a line where a learned drafter was put to use, or withdrawn. */
class Learning extends Chart {
  constructor(parent) {
    super(
      parent,
      "Learning: tokens per step, last hour",
      [{ label: "live", colour: "target", spanGaps: true, show: round(2) }, ...EXCHANGES],
      hour,
    );
    this.figure.classList.add("all");
    this.words = element("p");
    this.caption.append(this.words);
    this.points = [];
    this.exchanges = [];
  }

  show(_, now) {
    const { learning, time } = now;
    if (!(now.request_steps >= this.from?.request_steps)) [this.from, this.points] = [now, []]; // the server was restarted
    const steps = now.request_steps - this.from.request_steps;
    const latest = { time, length: steps ? (now.tokens - this.from.tokens) / steps : null };
    const points = [...this.points.filter((point) => time - point.time < 3600), latest];
    if (time - this.from.time >= POINT_SECONDS) [this.from, this.points] = [now, points];
    this.exchanges = learning.exchanges.map((each) => ({ ...each, minute: (each.at - learning.now) / 60 }));
    const none = points.map(() => null); // exchanges are separate lines
    this.plot([points.map((point) => (point.time - time) / 60), points.map(({ length }) => length), none, none]);
    const single = learning.in_use ? `drafter ${Number(learning.in_use)}` : "the drafter of the start";
    const drafter = learning.learned === undefined ? single : `${learning.learned} learned drafters`;
    const kept = (learning.answers ?? 0) + (learning.held_out ?? 0);
    const paused = now.requests.running && learning.phase !== "failed";
    this.words.textContent =
      `${drafter} in use · ${kept} answers kept · ${paused ? "paused" : PHASES[learning.phase] ?? "starting"}`;
  }

  tell(index) {
    super.tell(index);
    EXCHANGES.forEach(({ event }, at) => {
      this.values[at + 1].textContent = this.exchanges.filter((each) => each.event === event).length;
    });
  }

  /** Lines over the plot, each with its drafter's number. */
  mark({ ctx, bbox, valToPos }, colour) {
    ctx.save();
    ctx.lineWidth = 2 * devicePixelRatio;
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    [ctx.textAlign, ctx.textBaseline] = ["right", "top"];
    for (const { event, drafter, minute } of this.exchanges.filter((each) => each.minute > -60)) {
      ctx.strokeStyle = ctx.fillStyle = colour(EXCHANGES.find((about) => about.event === event).colour);
      const x = Math.round(valToPos(minute, "x", true));
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.fillText(Number(drafter), x - 4 * devicePixelRatio, bbox.top);
    }
    ctx.restore();
  }
}
