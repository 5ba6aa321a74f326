// Curves of one run, or of several over each other: over versions, trainer steps or time.

import { bars, lines } from "./charts.js";
import { FROZEN, card, get, h, keep, kept, link, num, quoted, runPath, short, trouble } from "./dom.js";

const AXES = { oldest: "oldest policy version", newest: "newest policy version",
  step: "trainer step", time: "wall time" };
const ABOUT = {
  oldest: "A rollout stands at the oldest policy version that sampled one of its tokens.",
  newest: "A rollout stands at the newest policy version that sampled one of its tokens.",
  step: "A rollout stands at the trainer step during which it was stored.",
  time: "Time since the run's first stored rollout.",
};
const MOST_RUNS = 6;

export async function curvesPage({ run, asked, signal }) {
  const { runs } = FROZEN ? { runs: [run] } : await get("/runs", {}, signal);
  const others = (asked.with || "").split("~").filter((name) => name !== run && runs.includes(name));
  const go = (more) => (location.hash = link(run, "curves", { ...asked, ...more }));
  const place = h("div", {});
  const add = runs.length > 1 ? h("select", { "aria-label": "Add a run", onchange: (event) =>
    go({ with: [...others, event.target.value].join("~") }) },
  h("option", { value: "" }, "add a run …"), runs.filter((name) => name !== run
    && !others.includes(name)).map((name) => h("option", { value: name }, name))) : null;
  const chips = others.map((name) => h("button", { type: "button", title: `leave out ${name}`,
    onclick: () => go({ with: others.filter((other) => other !== name).join("~") }) },
  short(name, 24), " ×"));
  return { shown: () => curves(place, [run, ...others].slice(0, MOST_RUNS),
    { signal, asked, go, more: [...chips, others.length + 1 < MOST_RUNS ? add : null] }),
  element: h("div", { class: "width" }, h("div", { class: "top" }, h("h1", {}, "Curves"),
    h("span", { class: "quiet" }, "what the service stored, and what the trainer logged")), place) };
}

// `go` writes a choice into the address; without it the choice stays on this page.
export async function curves(place, runs, { signal, asked, go, more = [] }) {
  const state = { axis: AXES[asked.axis] ? asked.axis : "oldest",
    smooth: Number(asked.smooth ?? kept("smooth") ?? 0) || 0, found: [] };
  const body = h("div", {});
  const about = h("span", { class: "quiet" });
  const draw = () => {
    about.textContent = ABOUT[state.axis];
    body.replaceChildren(...drawn(runs, state));
  };
  const load = async () => {
    try {
      state.found = await Promise.all(runs.map((run) =>
        get(`${runPath(run)}/curves/${state.axis}`, {}, signal)));
      draw();
    } catch (error) {
      if (!signal.aborted) body.replaceChildren(trouble(error, load));
    }
  };
  const axis = h("select", { "aria-label": "Horizontal axis", onchange: () => {
    state.axis = axis.value;
    if (go) go({ axis: state.axis });
    else load();
  } }, Object.entries(AXES).map(([name, title]) => h("option", { value: name,
    selected: name === state.axis }, title)));
  const smooth = h("input", { type: "range", min: "0", max: "0.95", step: "0.05",
    value: String(state.smooth), "aria-label": "Smoothing", oninput: () => {
      state.smooth = Number(smooth.value);
      keep("smooth", smooth.value);
      draw();
    } });
  body.append(h("p", { class: "quiet" }, "…"));
  place.replaceChildren(h("div", { class: "tools" }, h("label", {}, "over ", axis),
    h("label", { class: "slide" }, "smoothing ", smooth), more), h("p", {}, about), body);
  await load();
}

function drawn(runs, state) {
  const names = new Map();
  state.found.forEach(({ curves: each }, i) => each.forEach((curve) => {
    if (!names.has(curve.name)) names.set(curve.name, { ...curve, rows: [] });
    names.get(curve.name).rows.push(...curve.rows.map((row) => ({ ...row,
      z: [runs.length > 1 ? runs[i] : "", row.z || ""].filter(Boolean).join(" ") })));
  }));
  const cards = [];
  const single = [];
  for (const curve of names.values()) {
    const points = new Map();
    for (const { z, y } of curve.rows) points.set(z, [...(points.get(z) || []), y]);
    const moves = [...points.values()].some((ys) => new Set(ys).size > 1);
    if (moves || (points.size > 1 && !curve.logged)) cards.push(curve);
    else single.push(curve);
  }
  const part = (title, chosen) => (chosen.length ? [h("h2", { class: "section" }, title),
    h("div", { class: "grid" }, chosen.map((curve) => chart(runs, curve, state)))] : []);
  const parts = [...part("Rollouts", cards.filter(({ logged }) => !logged)),
    ...part("Trainer", cards.filter(({ logged, known }) => logged && known)),
    ...part("Also logged by the trainer", cards.filter(({ logged, known }) => logged && !known))];
  if (single.length) parts.push(h("h2", { class: "section" }, "One value throughout"),
    h("div", { class: "tiles" }, single.flatMap((curve) => lastOfEach(curve).map((row) =>
      h("div", { class: "tile" }, h("b", {}, num(row.y)), h("span", {},
        [curve.title, row.z].filter(Boolean).join(" · ")))))));
  if (![...names.values()].some((curve) => curve.logged)) {
    parts.push(h("p", { class: "quiet" }, "No trainer has logged a step of ",
      runs.length > 1 ? "these runs" : "this run", ": ", h("code", {},
        'client.log(run, step, {"loss": …})'), " adds curves."));
  }
  if (!cards.length && !single.length) {
    parts.unshift(h("p", { class: "empty" }, state.axis === "step"
      ? "No trainer has logged a step, so there is no such axis." : "No scored rollout is stored yet."));
  }
  return parts;
}

const lastOfEach = ({ rows }) => [...new Map(rows.map((row) => [row.z, row])).values()];

function chart(runs, curve, state) {
  const last = lastOfEach(curve);
  if (last.length === curve.rows.length) {
    return card(curve.title, bars(last.map((row) => ({ x: row.z, y: row.y }))));
  }
  const chosen = curve.where && runs.length === 1 && ((x) => {
    location.hash = link(runs[0], "rollouts", { where: curve.where.replaceAll("{x}", quoted(x)) });
  });
  return card(curve.title, lines(curve.rows, { chosen, smooth: state.smooth,
    label: AXES[state.axis], time: state.axis === "time" }));
}
