// Pictures of what an analysis gave: lines and stacks by uPlot, names and counts as bars of HTML.

import { big, h, num, pluralize, seconds, short } from "./dom.js";

const HEIGHT = 200;
const live = new Set();

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

export const SERIES = ["s1", "s2", "s3", "s4", "s5", "s6"];
// What always looks the same, whatever stands beside it.
const MEANT = { rewarded: "good", kept: "good", "no reward": "strong", dropped: "strong",
  infra: "bad", task: "s2", masked: "s6", cancelled: "s4" };

function plot(place, options, data) {
  const chart = { place, options, data, drawn: null };
  const draw = () => {
    chart.drawn?.destroy();
    const width = Math.max(200, place.clientWidth);
    chart.drawn = new uPlot({ width, height: HEIGHT, ...options() }, data, place);
  };
  chart.draw = draw;
  live.add(chart);
  new ResizeObserver(([entry]) => {
    const width = Math.round(entry.contentRect.width);
    if (!chart.drawn) draw();
    else if (width && Math.abs(width - chart.drawn.width) > 1) {
      chart.drawn.setSize({ width: Math.max(200, width), height: HEIGHT });
    }
  }).observe(place);
  return place;
}

export function redraw() {
  for (const chart of live) chart.place.isConnected ? chart.draw() : live.delete(chart);
}

function axes(text, xs, label) {
  const named = label ? { label, labelFont: "11px system-ui, sans-serif", labelSize: 16,
    labelGap: 0 } : {};
  const font = "11px system-ui, sans-serif";
  const line = { stroke: colour("quiet"), font, ticks: { show: false }, gap: 6 };
  const grid = { stroke: colour("line"), width: 1 };
  return [
    { ...line, ...named, grid: { show: false }, size: 26, values: (_, at) => at.map((x) => text(x)),
      incrs: xs.every(Number.isInteger) ? [1, 2, 5].flatMap((n) =>
        [1, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7].map((size) => n * size)).sort((a, b) => a - b)
        : undefined },
    { ...line, grid, size: 46, values: (_, at) => at.map((y) => big(y)) },
  ];
}

// An exponential moving average whose start is not drawn towards 0, as W&B smooths.
export function smoothed(values, weight) {
  let [sum, norm] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

// rows with x, y and perhaps z, the name of a series; x is a number
export function lines(rows, { chosen, time, label, smooth = 0 } = {}) {
  const all = [...new Set(rows.map((row) => row.z ?? ""))];
  const names = all.slice(0, SERIES.length);
  const xs = [...new Set(rows.map((row) => row.x))].sort((a, b) => a - b);
  const place = new Map(xs.map((x, i) => [x, i]));
  const ys = names.map(() => new Array(xs.length).fill(null));
  for (const row of rows) {
    const series = names.indexOf(row.z ?? "");
    if (series >= 0) ys[series][place.get(row.x)] = row.y;
  }
  const text = (x) => (time ? seconds(x) : big(x));
  const last = (y) => y.findLast((value) => value !== null);
  const element = h("div", { class: "plot", role: "img", "aria-label": names.map((name, i) =>
    `${name || "values"} over ${pluralize(xs.length, "point")}, from ${num(ys[i].find((y) => y !== null))} to `
    + num(last(ys[i]))).join("; ") });
  const points = () => ({ show: xs.length < 60, size: 5, fill: colour("card") });
  const now = h("span", { class: "now" });
  element.append(now);
  const drawn = smooth ? ys.map((y) => smoothed(y, smooth)) : ys;
  const known = ys.flat().filter((y) => y !== null);
  const [least, most] = [Math.min(...known), Math.max(...known)];
  const faint = smooth ? [(u) => ys.forEach((y, i) => {
    u.ctx.save();
    Object.assign(u.ctx, { strokeStyle: colour(SERIES[i]), globalAlpha: 0.3, lineWidth: 1 });
    u.ctx.beginPath();
    y.forEach((value, at) => value !== null
      && u.ctx.lineTo(u.valToPos(xs[at], "x", true), u.valToPos(value, "y", true)));
    u.ctx.stroke();
    u.ctx.restore();
  })] : [];
  const chart = plot(element, () => ({
    scales: { x: { time: false }, y: { range: () => (known.length ? padded(least, most)
      : padded(null, null)) } },
    axes: axes(text, xs, label),
    cursor: { y: false, points: { size: 7 } },
    legend: { show: names.length > 1 },
    series: [{ label: "at", value: (_, x) => (x === null ? "" : text(x)) },
      ...names.map((name, i) => ({ label: short(name || "y", 24), stroke: colour(SERIES[i]),
        width: 1.6, points: smooth ? { show: false } : points(), spanGaps: true,
        value: (_, y) => (y === null ? "" : num(y)) }))],
    hooks: { draw: faint, ready: [choosing(xs, chosen)], setCursor: names.length > 1 ? [] : [(u) => {
      const at = u.cursor.idx;
      now.textContent = at === null || at === undefined || ys[0][at] === null ? ""
        : `${text(xs[at])}: ${num(ys[0][at])}${counted(rows[at])}`;
    }] },
  }), [xs, ...drawn]);
  return all.length > names.length ? h("div", {}, chart, h("p", { class: "quiet" },
    `and ${pluralize(all.length - names.length, "more line")}`)) : chart;
}

// Of how many: the first number of a row that is neither x nor y.
function counted(row) {
  const name = Object.keys(row).find((key) => !"xyz".includes(key) && Number.isInteger(row[key]));
  return name ? ` (${num(row[name])} ${name})` : "";
}

function choosing(xs, chosen) {
  return (u) => {
    if (!chosen) return;
    u.over.classList.add("choose");
    u.over.addEventListener("click", () => {
      if (u.cursor.idx !== null && u.cursor.idx !== undefined) chosen(xs[u.cursor.idx]);
    });
  };
}

function padded(low, high) {
  if (low === null) return [0, 1];
  if (low >= 0 && low < high * 0.7) low = 0;
  // What differs by rounding alone leaves an axis no step that moves it.
  if (high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high))) {
    return low || high ? [Math.min(0, low), Math.max(0, high)] : [0, 1];
  }
  const more = (high - low) * 0.06;
  return [low === 0 ? 0 : low - more, high + more];
}

// rows with x and several numbers that add up, in this order
export function stack(rows, names, { chosen, label } = {}) {
  const xs = rows.map((row) => row.x);
  const sums = new Array(rows.length).fill(0);
  names = names.filter((name) => rows.some((row) => row[name]));
  const tops = names.map((name) => rows.map((row, i) => (sums[i] += row[name] || 0)));
  const order = names.map((_, i) => names.length - 1 - i);
  const near = Math.min(...xs.slice(1).map((x, i) => x - xs[i]), 1) / 2;
  const ends = [xs[0] - near, xs.at(-1) + near];
  const element = h("div", { class: "plot stacked", role: "img",
    "aria-label": `${names.join(", ")} over ${pluralize(rows.length, "point")}` });
  const bars = uPlot.paths.bars({ size: [0.8, 60], gap: 1 });
  return plot(element, () => ({
    scales: { x: { time: false, range: () => ends },
      y: { range: (_, low, high) => [0, high * 1.05 || 1] } },
    axes: axes(big, xs, label),
    cursor: { y: false, points: { show: false } },
    legend: { show: names.length > 1 },
    series: [{ label: "at" }, ...order.map((n) => ({ label: names[n], width: 0, paths: bars,
      stroke: colour(MEANT[names[n]] || SERIES[n % 6]), points: { show: false },
      fill: colour(MEANT[names[n]] || SERIES[n % 6]),
      value: (_, y, s, i) => (i === null ? "" : num(rows[i][names[n]])) }))],
    hooks: { ready: [choosing(xs, chosen)] },
  }), [xs, ...order.map((n) => tops[n])]);
}

// rows with a name, a size and perhaps a remark; a click chooses one
export function bars(rows, { chosen, most = 12, text = num } = {}) {
  const longest = Math.max(...rows.map((row) => Math.abs(row.y || 0)), 1e-12);
  const more = rows.length - most;
  return h("div", { class: "bars" }, rows.slice(0, most).map((row) => {
    const fill = h("span", { class: "fill" });
    fill.style.width = `${(Math.abs(row.y || 0) / longest) * 100}%`;
    const inside = [h("span", { class: "name", title: String(row.x) },
      row.x === "" || row.x === null ? "(none)" : typeof row.x === "number" ? num(row.x)
        : String(row.x)),
    h("span", { class: "track" }, fill), h("span", { class: "value" }, text(row.y))];
    return chosen ? h("button", { class: "bar", onclick: () => chosen(row.x) }, inside)
      : h("div", { class: "bar" }, inside);
  }), more > 0 ? h("p", { class: "quiet" }, `and ${num(more)} more`) : null);
}

export function spark(values, width = 120, height = 24) {
  const canvas = h("canvas", { class: "spark", role: "img",
    "aria-label": `from ${num(values[0])} to ${num(values.at(-1))}` });
  const ratio = devicePixelRatio || 1;
  Object.assign(canvas, { width: width * ratio, height: height * ratio });
  const draw = () => {
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    const known = values.filter((value) => value !== null);
    const [low, high] = [Math.min(0, ...known), Math.max(1e-9, ...known)];
    const y = (v) => height - 3 - ((v - low) / (high - low)) * (height - 6);
    const x = (i) => 2 + (i / Math.max(1, known.length - 1)) * (width - 4);
    pen.strokeStyle = colour("s1");
    pen.lineWidth = 1.5;
    pen.beginPath();
    known.forEach((value, i) => pen.lineTo(x(i), y(value)));
    pen.stroke();
  };
  draw();
  live.add({ place: canvas, draw });
  return canvas;
}
