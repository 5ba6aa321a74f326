// Runs, one run, its rollouts, its tasks, SQL, and what happens now.

import { bars, lines, spark, stack } from "./charts.js";
import { curves } from "./curves.js";
import {
  FROZEN, big, card, damage, get, h, here, keep, kept, link, listen, noun, num, painted, percent,
  pluralize, quoted, runPath, seconds, short, trouble, when,
} from "./dom.js";
import { Table } from "./table.js";

// Each verdict has a glyph of its own shape, so that nobody needs its colour.
const VERDICTS = { right: ["✓", "good"], partial: ["◐", "warn"], wrong: ["✕", "bad"],
  "not scored": ["○", ""], failed: ["▲", "bad"], cancelled: ["⊘", ""] };
const ABOUT_VERDICTS = "Reward: ✓ right, 1 or more · ◐ partial, between 0 and 1 · ✕ wrong, 0 or less"
  + " · ○ not scored: no reward that counts · ▲ failed: not the policy's fault · ⊘ cancelled";

export function verdict(row) {
  if (["infra", "task"].includes(row.failure_class)) return "failed";
  if (row.status === "cancelled") return "cancelled";
  if (!row.valid || !Number.isFinite(row.reward)) return "not scored";
  return row.reward >= 1 ? "right" : row.reward > 0 ? "partial" : "wrong";
}

export function verdictChip(row) {
  const name = verdict(row);
  const [glyph, kind] = VERDICTS[name];
  const scored = Number.isFinite(row.reward);
  return h("span", { class: `chip verdict ${kind}`, title: scored ? `${name}, reward ${row.reward}` : name },
    h("span", { "aria-hidden": true }, `${glyph} `),
    scored ? [h("span", { class: "sr" }, `${name}, reward `), num(row.reward)] : name);
}

export const verdictGlyph = (row) => [h("span", { "aria-hidden": true }, VERDICTS[verdict(row)][0]),
  h("span", { class: "sr" }, verdict(row))];

export function statusChip(row) {
  if (row.failure_code) {
    const kind = row.failure_class === "policy" ? "warn" : "bad";
    return h("span", { class: `chip ${kind}` }, row.failure_code);
  }
  return h("span", { class: "chip" }, row.status);
}

// ---- runs

export async function runsPage({ signal }) {
  const { runs } = await get("/runs", {}, signal);
  if (runs.length === 1) {
    if (!here().run) location.replace(link(runs[0])); // else somebody has gone on meanwhile
    return { element: h("p", {}) };
  }
  const titles = ["Run", "Reward", "", "Rollouts", "Valid", "Failed", "Groups kept", "Tokens",
    "Tokens/s", "Versions", "Last commit"];
  const asked = new URLSearchParams(location.hash.split("?")[1] || "");
  const compared = (asked.get("compare") || "").split("~").filter((run) => runs.includes(run));
  const chosen = new Set(compared);
  const compare = h("button", { disabled: true, title: "Tick two to four runs", onclick: () => {
    location.hash = "#/?compare=" + [...chosen].map(encodeURIComponent).join("~");
  } }, "Compare");
  const offer = () => {
    compare.disabled = chosen.size < 2 || chosen.size > 4;
    compare.textContent = chosen.size > 1 ? `Compare ${chosen.size}` : "Compare";
  };
  offer();
  const body = h("tbody", {});
  const rows = new Map(runs.map((run) => {
    const box = h("input", { type: "checkbox", "aria-label": `compare ${run}`,
      checked: compared.includes(run), onchange: () => {
      box.checked ? chosen.add(run) : chosen.delete(run);
      offer();
    } });
    const row = h("tr", {}, h("td", {}, box), h("td", {}, h("a", { href: link(run) }, run)),
      titles.slice(1).map((_, i) => h("td", {}, i ? "" : "…")));
    body.append(row);
    return [run, row];
  }));
  const place = h("div", {});
  const element = h("div", { class: "width" },
    h("div", { class: "top" }, h("h1", {}, pluralize(runs.length, "run")), compare), place,
    h("div", { class: "card scroll" }, h("table", { class: "list runs" },
      h("thead", {}, h("tr", {}, h("th", {}, ""), titles.map((t, i) =>
        h("th", { class: i > 2 ? "n" : "" }, t)))), body)));
  fillRuns(rows, signal);
  const compareNow = () => comparison(place, compared, signal).catch((error) => {
    if (!signal.aborted) place.replaceChildren(trouble(error, compareNow));
  });
  if (compared.length > 1) {
    place.replaceChildren(h("p", { class: "quiet" }, "…"));
    compareNow();
  }
  return { element };
}

const versions = ({ first_version: first, last_version: last }) =>
  (first === null || last === null ? "–" : last > first ? `${first}–${last}` : num(last));

async function fillRuns(rows, signal) {
  for (const [run, row] of rows) {
    const cells = row.children;
    try {
      const [found, { rows }, { rewards }] = await Promise.all(["", "/figures/funnel", "/spark"]
        .map((path) => get(runPath(run) + path, {}, signal)));
      const { decided, kept } = Object.fromEntries(rows.map(({ x, y }) => [x, y]));
      const t = found.totals;
      const speed = t.seconds > 0 ? big(t.sampled / t.seconds) : "–";
      const said = [num(t.reward), rewards.length > 2 ? spark(rewards) : "",
        num(t.rollouts), percent(t.valid / t.rollouts), t.failed ? num(t.failed) : "–",
        decided ? `${num(kept)} of ${num(decided)}` : "–", big(t.tokens), speed,
        versions(t), when(t.last_at)];
      said.forEach((value, i) => {
        cells[i + 2].replaceChildren(value);
        if (i > 1) cells[i + 2].className = "n";
      });
    } catch (error) {
      if (signal.aborted) return;
      cells[2].replaceChildren(h("span", { class: "chip bad", title: error.message }, "unreadable"),
        " ", short(error.message, 90));
      cells[2].colSpan = 10;
      [...cells].slice(3).forEach((cell) => cell.remove());
    }
  }
}

async function comparison(place, runs, signal) {
  const ask = (path) => Promise.all(runs.map((run) => get(runPath(run) + path, {}, signal)));
  const [found, made] = [await ask(""), await ask("/provenance")];
  const figures = [["Reward", (t) => num(t.reward)], ["Rollouts", (t) => num(t.rollouts)],
    ["Valid", (t) => percent(t.valid / t.rollouts)], ["Tokens", (t) => big(t.tokens)],
    ["Tokens a rollout", (t) => num(t.tokens / t.rollouts)]];
  const makers = [...new Set(made.flatMap(Object.keys))];
  const row = (name, values, marked) => h("tr",
    { class: marked && new Set(values).size > 1 ? "differs" : "" },
    h("td", {}, name), values.map((value) => h("td", {}, value)));
  const tasks = h("div", { class: "wide" });
  const drawn = h("div", {});
  place.replaceChildren(h("div", { class: "grid" },
    card("Side by side", h("table", { class: "list beside" },
      h("thead", {}, h("tr", {}, h("th", {}, ""), runs.map((r) => h("th", {}, r)))),
      h("tbody", {}, figures.map(([name, show]) => row(name, found.map((run) => show(run.totals)), false)),
        makers.map((what) => [what, made.map((by) => by[what] || "–")])
          .filter(([what, values]) => !what.startsWith("run.") || new Set(values).size > 1)
          .map(([what, values]) => row(what, values, true)))), null, true),
    tasks), drawn);
  curves(drawn, runs, { signal, asked: {}, go: null });
  if (runs.length !== 2) {
    tasks.append(h("p", { class: "quiet" }, "Tick two runs to see the difference of each task."));
    return;
  }
  const [a, b] = runs;
  const fill = async () => {
    try {
      tasks.replaceChildren(differences(a, b, await get("/difference", { a, b }, signal)));
    } catch (error) {
      if (!signal.aborted) tasks.replaceChildren(trouble(error, fill));
    }
  };
  await fill();
}

const signed = (value) => (value > 0 ? "+" : "") + num(value);
const between = ({ low, high }) => (low === null ? "one rollout is too few"
  : `${signed(low)} to ${signed(high)}`);

const many = (rollouts) => h("span", { class: "quiet" }, ` (n = ${num(rollouts)})`);

// Flipped tasks first, then the largest differences.
function differences(a, b, found) {
  const title = `Tasks: ${b} minus ${a}`;
  if (!found.shared) return card(title, h("p", { class: "quiet" }, "No task is in both runs."));
  const to = (run, task, text) => h("a", { href: link(run, "rollouts",
    { where: `task_id = ${quoted(task)}` }) }, text);
  const chip = (row) => {
    const kind = row.low > 0 ? "good" : row.high < 0 ? "bad" : "";
    return h("span", { class: `chip ${kind}` }, signed(row.difference));
  };
  return card(title, [h("p", { class: "quiet" },
    `${pluralize(found.shared, "task")} in both, ${num(found.flipped)} flipped (from below half of the`
    + " reward to above, or back). Mean difference ", h("b", {}, signed(found.mean)),
    `, 95 % interval ${between(found)}. Coloured where the interval of a task excludes 0.`),
  h("div", { class: "scroll tall" }, h("table", { class: "list" }, h("thead", {}, h("tr", {},
    h("th", {}, "task"), h("th", {}, ""), [a, b, "difference", "95 % interval"].map((name) =>
      h("th", { class: "n" }, short(name, 24))))), h("tbody", {}, found.tasks.map((row) => h("tr", {},
    h("td", {}, short(row.task_id, 60)), h("td", {}, row.flipped ? h("span",
      { class: "chip warn" }, "flipped") : ""),
    h("td", { class: "n" }, to(a, row.task_id, num(row.a)), many(row.n_a)),
    h("td", { class: "n" }, to(b, row.task_id, num(row.b)), many(row.n_b)),
    h("td", { class: "n" }, chip(row)), h("td", { class: "n" }, between(row)))))))], null, true);
}

// ---- one run

// A checkpoint is named by its folder; the whole path is the title.
const named = (policy) => policy.replace(/(^|:)\/(?!\/).*\//, "$1");
const bytes = (size) => (size < 1000 ? `${num(size)} B` : `${big(size)}B`);

export async function runPage({ run, signal }) {
  const [found, { runs }] = await Promise.all([get(runPath(run), {}, signal),
    FROZEN ? { runs: [run] } : get("/runs", {}, signal)]);
  const t = found.totals;
  const to = (where) => link(run, "rollouts", { where });
  const tile = (value, what, where) => h(where === undefined ? "div" : "a",
    { class: "tile", href: where === undefined ? null : to(where) }, h("b", {}, value),
    h("span", {}, what));
  const place = h("div", {});
  const element = h("div", { class: "width" },
    h("div", { class: "top" }, h("h1", {}, found.run),
      h("span", { class: "quiet", title: found.policy.join(", ") }, [
        found.created_at || t.last_at ? when(found.created_at || t.last_at) : "",
        found.policy.map(named).join(", "), bytes(found.bytes)].filter(Boolean).join(" · ")),
      runs.length > 1 ? h("select", { "aria-label": "Compare with a run", onchange: (event) =>
        (location.hash = "#/?compare=" + [event.target.value, run].map(encodeURIComponent).join("~")) },
      h("option", { value: "" }, "compare with …"), runs.filter((name) => name !== run).map((name) =>
        h("option", { value: name }, name))) : null),
    damage(found.damaged),
    h("div", { class: "tiles" },
      tile(num(t.reward), t.reward_error === null ? "mean reward"
        : ["mean reward ", h("span", { class: "nowrap", title: "standard error over the means of tasks" },
          `± ${num(t.reward_error, 2)}`)], "valid"),
      tile(num(t.rollouts), noun(t.rollouts, "rollout"), ""),
      tile(percent(t.valid ? t.rewarded / t.valid : null), "rewarded, of the valid",
        "valid and reward > 0"),
      tile(num(t.masked), "masked or cancelled",
        "not valid and failure_class not in ('infra', 'task')"),
      tile(num(t.failed), noun(t.failed, "infra or task failure"), "failure_class in ('infra', 'task')"),
      tile(num(t.groups), `${noun(t.groups, "group")} of ${pluralize(t.tasks, "task")}`),
      tile(big(t.tokens), `tokens, ${big(t.sampled)} sampled`),
      t.continued_calls + t.rendered_calls ? tile(percent(t.continued_calls / t.calls), `of model calls continued recorded ids; ${percent(
        t.continued_calls ? t.retokenization_mismatches / t.continued_calls : 0)} would differ if rendered again`) : null,
      tile(t.seconds > 0 ? big(t.sampled / t.seconds) : "–", "sampled tokens/s"),
      tile(versions(t), t.last_version > t.first_version ? "policy versions" : "policy version")),
    place);
  fillFigures(run, found.figures, place, signal);
  return { element };
}

// With a single value these say what the tiles on top of the page say.
const RESTATED = new Set(["reward", "rewards", "sources", "staleness", "kept"]);

// Cards of a column stand right below each other: each spans as many rows of 2 pixels as it is high.
const PACKER = new ResizeObserver((entries) => entries.forEach(({ target }) => {
  target.style.gridRowEnd = `span ${Math.ceil((target.offsetHeight + GAP) / 2)}`;
}));
const GAP = 14;

// A card for what is worth a chart; single values stand together above the cards of their part.
async function fillFigures(run, figures, place, signal) {
  const names = inOrder(figures);
  const cards = names.map(({ title }) => card(title, h("p", { class: "quiet plot" }, "…")));
  const singles = new Map(names.map(({ part }) => [part,
    h("div", { class: "tiles wide", hidden: true })]));
  const heads = new Map([...singles.keys()].map((part) => [part,
    h("h2", { class: "section" }, part)]));
  for (const [part, head] of heads) {
    const grid = h("div", { class: "grid packed" }, singles.get(part),
      cards.filter((_, i) => names[i].part === part));
    [...grid.children].forEach((child) => PACKER.observe(child));
    place.append(head, grid);
  }
  const empty = [];
  const fill = async ({ name, title, part }, i) => {
    const asked = await get(`${runPath(run)}/figures/${name}`, {}, signal)
      .catch((error) => ({ rows: [], title, error: error.message }));
    if (signal.aborted) return;
    if (asked.rows.length === 1 && !asked.error && name !== "suspects"
      && (asked.picture !== "stack" || RESTATED.has(name))) {
      cards[i].remove();
      if (RESTATED.has(name)) return;
      singles.get(part).hidden = false;
      singles.get(part).append(value(asked.rows[0], title, choice(run, asked)));
    } else if (asked.rows.length || asked.error) {
      const made = card(title, figure(run, asked, () => fill({ name, title, part }, i)),
        asked.sql && sqlOf(run, asked));
      cards[i].replaceWith(made);
      cards[i] = made;
      PACKER.observe(made);
    } else {
      cards[i].remove();
      empty.push(title);
    }
  };
  await painted();
  await Promise.all(names.map(fill));
  for (const [part, head] of heads) {
    head.hidden = singles.get(part).hidden
      && !names.some((each, i) => each.part === part && cards[i].isConnected);
  }
  if (!empty.length) return;
  place.append(h("details", { class: "more", open: empty.length < 8 },
    h("summary", {}, `Nothing is stored for ${num(empty.length)} more`), empty.join(" · ")));
}

// Within a part tall pictures stand before short lists, so that no row of cards has holes.
function inOrder(figures) {
  const parts = [...new Set(figures.map(({ part }) => part))];
  const rank = ({ part, picture }) => 2 * parts.indexOf(part) + (picture === "bars" ? 1 : 0);
  return [...figures].sort((a, b) => rank(a) - rank(b));
}

const choice = (run, asked) => asked.where && ((x) => {
  location.hash = link(run, "rollouts", { where: asked.where.replaceAll("{x}", quoted(x)) });
});

function figure(run, asked, again = null) {
  if (asked.error) return trouble(asked.error, again);
  const { rows } = asked;
  if (!rows.length) return h("p", { class: "quiet" }, NOTHING);
  const chosen = choice(run, asked);
  const options = { chosen, label: asked.axis };
  if (asked.picture === "line") return curve(rows, options);
  if (asked.name === "rewards" && rows.length > 12) return stack(rows, ["y"], options);
  if (asked.picture === "stack") {
    const names = Object.keys(rows[0]).filter((name) => name !== "x");
    return rows.length > 1 ? stack(rows, names, options)
      : bars(names.map((name) => ({ x: name, y: rows[0][name] })).filter((row) => row.y));
  }
  return bars(rows, options);
}

const NOTHING = "Nothing is stored for it.";

// Lines, or what they would be about where all of it is at one x.
function curve(rows, options = {}) {
  if (new Set(rows.map((row) => row.x)).size > 1) return lines(rows, options);
  return h("div", {}, bars(rows.map((row) => ({ x: row.z ?? row.x, y: row.y }))),
    rows[0].z ? h("p", { class: "quiet" }, `all at ${options.label} ${num(rows[0].x)}`) : null);
}

function value({ x, y }, title, chosen) {
  const name = x === "" || x === null ? "(none)" : num(x);
  const text = [h("b", {}, num(y)), h("span", {}, `${title}: ${name}`)];
  return chosen ? h("button", { type: "button", class: "tile", onclick: () => chosen(x) }, text)
    : h("div", { class: "tile" }, text);
}

export function figurePage(asked) {
  document.getElementById("bar").remove();
  return { element: card(asked.title, figure("", asked)) };
}

function sqlOf(run, asked) {
  return h("details", { class: "more" }, h("summary", {}, `${pluralize(asked.rows.length, "row")}, SQL`),
    h("div", { class: "scroll" }, grid(asked.rows.slice(0, 100))), h("pre", {}, asked.sql),
    h("a", { href: link(run, "sql", { q: asked.sql }) }, "Open in the SQL page"));
}

const TIMESTAMP = /^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?\+00:00$/;

function grid(rows, run = "") {
  const names = Object.keys(rows[0] || {});
  const number = (name) => name !== "rollout_id" && rows.some((row) => typeof row[name] === "number");
  return h("table", { class: "list" }, h("thead", {}, h("tr", {}, names.map((name) =>
    h("th", { class: number(name) ? "n" : "" }, name)))), h("tbody", {}, rows.map((row) => h("tr", {}, names.map((name) => {
    const value = row[name];
    if (name === "rollout_id" && run && value !== null) {
      return h("td", {}, h("a", { href: link(run, "rollout", {}, value) }, String(value)));
    }
    const plain = value === null ? "–" : typeof value === "object" ? JSON.stringify(value)
      : TIMESTAMP.test(value) ? value.slice(0, 19).replace("T", " ") : value;
    const kind = number(name) ? "n" : String(plain).length < 40 ? "short" : "";
    return h("td", { class: kind }, typeof plain === "number"
      ? num(plain, 4) : short(String(plain), 300));
  })))));
}

// ---- rollouts

const WIDTHS = { rollout_id: 62, task_id: 132, failure_message: 150, rollout_key: 160, extra: 220,
  committed_at: 140, reward: 112, status: 116, asked: 120, answered: 110, expected: 76, run_s: 92,
  num_turns: 56, num_sampled: 74 };
const USUAL = ["rollout_id", "reward", "task_id", "asked", "answered", "expected",
  "failure_message", "num_turns", "num_sampled", "run_s"];
const ON_PHONES = ["reward", "asked", "answered"];
const SPOKEN = ["asked", "answered", "expected"];
const TITLES = { reward: "verdict", asked: "prompt", answered: "answer", run_s: "time in RUN",
  failure_code: "failure code", data_source: "source",
  failure_class: "failure class", failure_message: "error", status: "outcome",
  rollout_id: "rollout", task_id: "task", num_turns: "turns", min_version: "oldest version",
  max_version: "newest version",
  num_tool_calls: "calls", num_sampled: "sampled", num_tokens: "tokens", stop_reason: "stopped" };
const NUMBERS = /^(int|float|double)/;

// A name breaks behind its punctuation first.
const breakable = (text) => text.split(/(?<=[:/_.-])/).flatMap((part) => [part, h("wbr")]);

function column({ name, type }, sort, wide) {
  const number = NUMBERS.test(type);
  const show = name === "reward" ? verdictChip
    : name === "status" ? statusChip
    : name === "failure_message" ? (row) => (row.failure_code
      ? [statusChip(row), " ", row.failure_message] : "–")
    : name === "committed_at" ? (row) => when(row.committed_at)
    : name.endsWith("_s") ? (row) => seconds(row[name])
    : name.endsWith("_version") ? (row) => (row[name] < 0 ? "–" : num(row[name]))
    : number && !name.endsWith("_id") ? (row) => num(row[name])
    : SPOKEN.includes(name) ? (row) => row[name] || "–"
    : name === "task_id" ? (row) => breakable(row.task_id)
    : (row) => (row[name] === null ? "–" : typeof row[name] === "object"
      ? JSON.stringify(row[name]) : String(row[name]) || "–");
  return { name, title: TITLES[name] || name, about: name === "reward" ? ABOUT_VERDICTS : name,
    show, sort, wide, wraps: ["task_id", "expected", "failure_message"].includes(name), kind: number && !["rollout_id", "reward"].includes(name) ? "n" : "",
    grows: ["asked", "answered", "failure_message"].includes(name), width: WIDTHS[name] || (number ? 88 : 130) };
}

export async function rolloutsPage({ run, asked, signal, bind }) {
  const about = await get(runPath(run), {}, signal);
  const columns = [...about.columns, ...SPOKEN.map((name) => ({ name, type: "string" }))];
  const known = new Map(columns.map((each) => [each.name, each]));
  // A column for errors where there are none takes the room of prompts.
  const usual = about.totals.failures ? USUAL
    : USUAL.filter((name) => name !== "failure_message");
  const shown = (asked.columns ? asked.columns.split(",") : usual).filter((n) => known.has(n));
  const go = (more) => (location.hash = link(run, "rollouts", { ...asked, ...more }));
  const sort = (name) => go(asked.order !== name ? { order: name, down: "1" }
    : { order: name, down: asked.down ? "" : "1" });
  const question = { words: asked.words, where: asked.where, order: asked.order,
    down: asked.down };
  const narrowed = asked.where || asked.words;
  const table = new Table({
    label: `rollouts of ${run}`,
    text: 2,
    columns: shown.map((name) => column(known.get(name),
      FROZEN || SPOKEN.includes(name) ? null : () => sort(name),
      !asked.columns && !ON_PHONES.includes(name))),
    page: (offset, limit) => get(`${runPath(run)}/rows`, { ...question, offset, limit }, signal),
    open: (row) => (location.hash = link(run, "rollout", question, row.rollout_id)),
    sorted: question,
  });
  const words = h("input", { class: "words", type: "search", value: asked.words || "",
    "aria-label": "Words of tasks, messages and errors", placeholder: "words   ( / )" });
  const box = h("input", { class: "filter", type: "search", value: asked.where || "",
    "aria-label": "Filter: an SQL condition", spellcheck: "false", placeholder:
      "and in SQL, e.g.  reward = 0 and num_turns > 3" });
  const form = h("form", { class: "tools", onsubmit: (event) => {
    event.preventDefault();
    go({ where: box.value, words: words.value });
  } }, words, box, h("button", { class: "main" }, "Filter"),
  narrowed ? h("button", { type: "button", onclick: () => go({ where: "", words: "" }) }, "Clear")
    : null,
  menu(columns, shown, (names) => go({ columns: names.join(",") })));
  const unscored = h("div", {});
  const count = h("span", { class: "quiet" }, "…");
  const facets = h("div", {});
  const values = h("details", { class: "facets", open: innerWidth > 1200 && kept("values") !== "no",
    ontoggle: () => innerWidth > 1200 && keep("values", values.open ? "yes" : "no") },
  h("summary", {}, "Values to filter by"), facets);
  const wrong = h("div", {});
  bind({ j: () => table.move(1), k: () => table.move(-1), Enter: () => table.enter(),
    "/": () => words.focus(), Escape: () => go({ where: "", words: "" }), G: () => table.show(table.total - 1) });
  const shownAt = async () => {
    try {
      await table.start();
      count.textContent = narrowed ? `${num(table.total)} of ${num(about.totals.rollouts)}`
        : num(table.total);
      if (!table.total) wrong.replaceChildren(h("p", { class: "empty" }, narrowed
        ? "No rollout matches the filter." : "No rollout is stored yet."));
      table.element.parentElement.hidden = !table.total;
      const failures = await get(`${runPath(run)}/figures/failures`, {}, signal);
      unscored.replaceChildren(...notScored(run, about.totals, failures));
      if (FROZEN) return;
      const found = await get(`${runPath(run)}/facets`, { where: asked.where, words: asked.words },
        signal);
      fillFacets(facets, found.facets, table.total, about.totals.rollouts, (where) =>
        go({ where: asked.where ? `${asked.where} and ${where}` : where }));
    } catch (error) {
      if (!signal.aborted) wrong.replaceChildren(trouble(error, shownAt));
      if (count.textContent === "…") count.textContent = "";
    }
  };
  return { whole: true, shown: shownAt, element: h("div", { class: "width whole-page" },
    h("div", { class: "top" }, h("h1", {}, "Rollouts"), count), damage(about.damaged),
    unscored, FROZEN ? null : form, wrong,
    h("div", { class: "split" }, FROZEN ? null : h("aside", { "aria-label": "Values" }, values),
      table.element)) };
}

// How many rollouts have no score that counts, and why; a click shows those of one reason.
function notScored(run, totals, failures) {
  const lost = totals.rollouts - totals.valid;
  if (!lost) return [];
  const unscored = failures.rows.filter((row) => row.unscored);
  const reasons = unscored.map((row) => h("li", {}, h("a", { href: link(run, "rollouts", {
    where: `not valid and ${failures.where.replaceAll("{x}", quoted(row.x))}` }) },
  `${num(row.unscored)} ${row.x}`),
  row.example ? h("span", { class: "quiet" }, " ", short(row.example, 120)) : null));
  const rest = lost - unscored.reduce((sum, row) => sum + row.unscored, 0);
  if (rest > 0) {
    reasons.push(h("li", {}, h("a", { href: link(run, "rollouts", {
      where: "not valid and failure_code = ''" }) }, `${num(rest)} without a token that trains`),
    h("span", { class: "quiet" }, " ", "none was sampled, or by weights of no version of this run")));
  }
  return [h("details", { class: "unscored", open: reasons.length < 4 }, h("summary", {},
    `${num(lost)} of ${pluralize(totals.rollouts, "rollout")} ${noun(lost, "has", "have")}`
    + " no score that counts"),
  h("ul", {}, reasons))];
}

function menu(columns, shown, chosen) {
  const boxes = columns.map(({ name }) => h("label", {}, h("input", { type: "checkbox", value: name,
    checked: shown.includes(name) }), " ", name));
  const done = () => chosen(boxes.map((label) => label.firstChild).filter((box) => box.checked)
    .map((box) => box.value));
  return h("details", { class: "menu" }, h("summary", {}, "Columns"),
    h("div", {}, boxes, h("p", {}, h("button", { class: "main", type: "button", onclick: done },
      "Show"))));
}

function fillFacets(place, found, chosen, all, choose) {
  const names = [...new Set(found.map((row) => row.name))].filter((name) =>
    found.some((row) => row.name === name && row.n < all && row.value !== ""));
  place.replaceChildren(...names.map((name) => {
    const rows = found.filter((row) => row.name === name);
    return h("section", {}, h("h2", {}, name === "reward" ? name : TITLES[name] || name), rows.slice(0, 7).map((row) => {
      const usual = row.of / all;
      const lift = chosen && chosen < all ? row.n / chosen / usual : 1;
      const value = row.value === null ? `${name} is null`
        : `${name} = ${/^-?[\d.]+$/.test(row.value) ? row.value : quoted(row.value)}`;
      return h("button", { class: "facet", onclick: () => choose(value), title:
        `${percent(row.n / chosen)} here, ${percent(usual)} of all; mean reward ${num(row.reward)}` },
      h("span", {}, row.value === "" ? "(none)" : row.value === null ? "no value"
        : isNaN(row.value) ? row.value : name.endsWith("_version") && row.value < 0 ? "no version"
        : num(Number(row.value))),
      h("span", { class: "lift" }, lift > 1.5 && row.n > 3 ? `×${num(lift, 2)}` : ""),
      h("span", { class: "quiet" }, num(row.n)));
    }), rows.length > 7 ? h("span", { class: "quiet" }, `  and ${rows.length - 7} more`) : null);
  }));
}

// ---- tasks

const TASKS = `with halves as (
    select *, ntile(2) over (order by min_version, committed_at, rollout_id) as half
    from rollouts where valid),
prompts as (
    select task_id, any_value(left(coalesce(task->>'$.prompt[#-1].content', task->>'$.prompt'), 200))
        as prompt
    from tasks group by task_id)
select task_id, any_value(prompt) as prompt, any_value(data_source) as source, count(*) as rollouts,
    avg((reward > 0)::int) as solved, avg((reward > 0)::int) filter (half = 1) as before,
    avg((reward > 0)::int) filter (half = 2) as after,
    after - before as change, avg(num_turns) as turns, avg(run_s) as run_s
from halves left join prompts using (task_id) group by task_id`;
const VIEWS = { hardest: ["Hardest", "solved, task_id"], never: ["Never solved", "rollouts desc"],
  flipped: ["Flipped", "abs(change) desc, task_id"], better: ["Better", "change desc, task_id"],
  worse: ["Worse", "change, task_id"], slow: ["Slowest", "run_s desc"] };

export async function tasksPage({ run, asked, signal }) {
  const view = VIEWS[asked.view] ? asked.view : "hardest";
  const only = { never: " having solved = 0", flipped: " having abs(change) >= 0.5",
    better: " having change > 0", worse: " having change < 0" }[view] || "";
  const q = `${TASKS}${only} order by ${VIEWS[view][1]}`;
  const { rows, more } = await get(`${runPath(run)}/sql`, { q, page: "tasks" }, signal);
  const share = (value, kind = "n") => h("td", { class: kind }, percent(value));
  // A task that was played in one half of the run alone has changed in nothing.
  const changes = rows.some((row) => row.change !== null);
  return { element: h("div", { class: "width" },
    h("div", { class: "top" }, h("h1", {}, "Tasks"), h("span", { class: "quiet" },
      `${more ? "the first " : ""}${pluralize(rows.length, "task")} · solved: share of rollouts with a reward above 0`
      + (changes ? " · before and after: first and second half of the run's rollouts" : ""))),
    h("nav", { class: "tabs", "aria-label": "Which tasks" }, Object.entries(VIEWS).map(([name, [t]]) =>
      h("a", { href: link(run, "tasks", { view: name }), "aria-current":
        name === view ? "page" : null }, t))),
    rows.length ? h("div", { class: "card scroll" }, h("table", { class: "list" }, h("thead", {},
      h("tr", {}, h("th", {}, "task"), h("th", { class: "roomy" }, "prompt"),
        h("th", { class: "roomy" }, "source"), ["rollouts", "solved",
          ...(changes ? ["before", "after", "change, points"] : []), "turns", "time in RUN"].map((t) =>
          h("th", { class: ["rollouts", "solved", "change, points"].includes(t) ? "n" : "n roomy" }, t)))),
    h("tbody", {}, rows.map((row) => h("tr", {},
      h("td", {}, h("a", { href: link(run, "rollouts", { where:
        `task_id = ${quoted(row.task_id)}`, order: "reward" }) }, short(row.task_id, 60))),
      h("td", { class: "roomy" }, short(row.prompt || "–", 90)),
      h("td", { class: "quiet roomy" }, row.source), h("td", { class: "n" }, num(row.rollouts)),
      share(row.solved), changes ? [share(row.before, "n roomy"), share(row.after, "n roomy"), h("td", { class: "n" },
        row.change === null ? "–" : h("span",
          { class: "chip " + (row.change > 0 ? "good" : row.change < 0 ? "bad" : "") },
          (row.change > 0 ? "+" : "") + num(row.change * 100)))] : null,
      h("td", { class: "n roomy" }, num(row.turns)),
      h("td", { class: "n roomy" }, seconds(row.run_s)))))))
      : h("p", { class: "empty" }, ["flipped", "better", "worse"].includes(view)
        ? "No task of this run: only one with rollouts in both halves of the run can have changed."
        : "No task of this run belongs here.")) };
}

// ---- SQL

const SQL_TABLES = ["rollouts", "sequences", "turns", "messages", "groups", "tasks", "deliveries",
  "scores", "trained", "annotations", "versions", "metrics", "attempts", "partial", "passk",
  "tool_calls"];
const EXAMPLES = [
  ["reward by task", "select task_id, avg(reward) as reward, count(*) as n\nfrom rollouts\n"
    + "group by all order by reward limit 50"],
  ["what failed, and where", "select failure_code, stage, node, server, count(*) as attempts,"
    + " any_value(failure_message) as example\nfrom attempts\ngroup by all order by attempts desc"],
  ["tools, and how often they failed", "select name, count(*) as calls,\n    avg((error <> '' or timed_out"
    + " or coalesce(exit_code, 0) <> 0)::int) as failed_share,\n    count(distinct rollout_id) as"
    + " rollouts, any_value(arguments) as example\nfrom tool_calls group by all order by calls desc"],
  ["tokens by turn", "select turn, count(*) as calls, avg(completion_tokens) as sampled,\n"
    + "    avg(prompt_tokens) as prompt, avg(llm_s) as model_s, avg(tool_s) as tools_s\nfrom turns"
    + " group by all order by turn"],
  ["equal answers", "select task_id, count(*) as rollouts, avg(reward) as reward,\n"
    + "    any_value(rollout_id) as rollout_id\nfrom rollouts where artifact_digest <> ''\n"
    + "group by task_id, artifact_digest having count(*) > 1 order by rollouts desc limit 50"],
  ["tokens and turns by reward", "select reward > 0 as rewarded, avg(num_turns) as turns,"
    + " avg(num_sampled) as sampled,\n    quantile_cont(run_s, 0.95) as p95_s\nfrom rollouts where"
    + " valid\ngroup by all"],
];

export async function sqlPage({ run, asked, signal, bind }) {
  const box = h("textarea", { rows: "6", class: "mono", "aria-label": "One SELECT", spellcheck:
    "false" });
  box.value = asked.q || EXAMPLES[0][1];
  box.style.width = "100%";
  const place = h("div", {});
  const ask = () => (location.hash = link(run, "sql", { q: box.value }));
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) ask();
  });
  bind({ "/": () => box.focus() });
  if (asked.q) {
    try {
      const start = performance.now();
      const { rows, more } = await get(`${runPath(run)}/sql`, { q: asked.q }, signal);
      const took = seconds((performance.now() - start) / 1000);
      place.replaceChildren(h("p", { class: "quiet" }, `${pluralize(rows.length, "row")} in ${took}`
        + (more ? "; there are more" : "")), rows.length
        ? h("div", { class: "card scroll" }, grid(rows, run)) : "");
    } catch (error) {
      place.replaceChildren(trouble(error));
    }
  }
  return { element: h("div", { class: "width" }, h("div", { class: "top" }, h("h1", {}, "SQL"),
    h("span", { class: "quiet" }, "one SELECT over ", SQL_TABLES.flatMap((name, i) => [i ? ", " : "",
      h("a", { href: link(run, "sql", { q: `select * from ${name} limit 20` }) }, name)]))),
  box, h("p", { class: "tools" }, h("button", { class: "main", onclick: ask }, "Run"),
    h("span", { class: "quiet" }, "Ctrl-Enter · examples: "),
    EXAMPLES.map(([name, q]) => h("a", { href: link(run, "sql", { q }) }, name))),
  place) };
}

// ---- live

export async function livePage({ run, signal }) {
  const place = h("div", {}, h("p", { class: "empty" }, "Waiting for the first event…"));
  const past = [];
  const told = (now) => {
    past.push(now);
    if (past.length > 300) past.shift();
    place.replaceChildren(...liveNow(run, now, past));
  };
  listen(`${runPath(run)}/events`, told, signal).catch((error) => {
    if (!signal.aborted) place.replaceChildren(trouble(error));
  });
  return { element: h("div", { class: "width" }, h("div", { class: "top" }, h("h1", {}, "Live"),
    h("span", { class: "quiet" }, "what is stored and what the service does now, at most once a second")), place) };
}

function liveNow(run, now, past) {
  const t = now.totals;
  const [first] = past.slice(-30);
  const span = now.at - first.at;
  const rate = span > 0 ? (t.rollouts - first.totals.rollouts) / span : null;
  const tile = (value, what) => h("div", { class: "tile" }, h("b", {}, value), h("span", {}, what));
  const s = now.service;
  const mine = s?.runs.find((each) => each.run_id === run);
  const tiles = h("div", { class: "tiles" }, tile(num(t.rollouts), noun(t.rollouts, "stored rollout")),
    tile(rate === null ? "–" : num(rate), "rollouts/s, last half minute"),
    tile(num(t.reward), "mean reward"),
    tile(num(t.failed), noun(t.failed, "infra or task failure")),
    tile(t.last_version < 0 ? "–" : num(t.last_version), "newest version sampled"),
    s ? tile(s.bottleneck || "none", "bottleneck") : null,
    s ? tile(num(s.waiting_for_backend), "waiting for a model server") : null,
    mine ? tile(num(mine.counts.queued), noun(mine.counts.queued, "queued rollout") + " of this run") : null);
  const recent = t.last_at && h("p", {}, h("a", { href: link(run, "rollouts", { order: "committed_at",
    down: "1" }) }, `Last commit ${when(t.last_at)}: the newest rollouts`));
  if (!s) return [tiles, recent || "", h("p", { class: "quiet" }, now.silent)];
  const table = (title, names, rows) => {
    const kinds = names.map((_, i) => (i && rows.every((row) => /^[\d–]/.test(row[i])) ? "n" : ""));
    return h("section", { class: "card scroll wide" }, h("header", {}, h("h2", {}, title)),
      h("table", { class: "list" }, h("thead", {}, h("tr", {},
        names.map((name, i) => h("th", { class: kinds[i] }, name)))), h("tbody", {},
        rows.map((row) => h("tr", {}, row.map((cell, i) => h("td", { class: kinds[i] }, cell)))))));
  };
  const stages = Object.entries(s.stages).map(([name, g]) => [
    name === s.bottleneck ? h("b", {}, name) : name, num(g.workers), num(g.slots), num(g.busy),
    percent(g.busy_share), num(g.queued), waits(name, g, s)]);
  return [tiles, recent, mine?.stalled ? h("p", { class: "trouble" }, mine.stalled) : null,
    mine?.idle ? h("p", { class: "quiet" }, mine.idle) : null,
    h("div", { class: "grid" },
      table("Stages", ["stage", "workers", "slots", "busy", "busy share", "queued", "waits for"],
        stages),
      table("Model servers", ["server", "state", "in flight", "prompt cached"], s.backends.map(
        (b) => [b.name, b.reason || b.state, num(b.in_flight), percent(b.cached_share)])),
      table("Rollouts that run longest", ["rollout", "running for", "attempt", "workers",
        "model server"],
        s.oldest_attempts.map((r) => [`${r.run_id}/${r.rollout_id} ${short(r.task_id, 40)}`,
          seconds(r.leased_s), num(r.attempt), r.holders.join(", "), r.backend])),
      table("Workers", ["worker", "role", "node", "slots", "in flight"], s.workers.map((w) =>
        [w.worker, w.role, w.node, num(w.slots), num(w.in_flight)])))].filter(Boolean);
}

function waits(name, gauges, s) {
  if (!gauges.workers) return "a worker";
  if (gauges.queued > 0) return "downstream";
  if (gauges.busy >= gauges.slots) return name === "run" ? "model servers and tools" : "itself";
  if (name === "run" && s.waiting_for_backend) return "a model server";
  return gauges.busy ? "nothing" : "work from upstream";
}
