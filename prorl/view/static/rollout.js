// One rollout: what was said and done, its exact tokens, its siblings, the raw row.

import {
  copy, damage, get, h, link, num, pluralize, post, runPath, say, seconds, short, trouble, when,
} from "./dom.js";
import { finder } from "./find.js";
import { statusChip, verdictChip, verdictGlyph } from "./pages.js";
import { terminal } from "./terminal.js";

const TABS = { messages: "Messages", tokens: "Tokens", siblings: "Siblings", raw: "Raw" };
const LONG = 20000;
const PIECES = 500;

export async function rolloutPage({ run, id, asked, signal, bind }) {
  const path = `${runPath(run)}/rollouts/${encodeURIComponent(id)}`;
  const early = asked.tab === "tokens" ? get(`${path}/tokens`, {}, signal) : null;
  early?.catch(() => null); // told below
  // A place within one rollout is none within another.
  const { words, where, order, down, at: _, turn: __, ...rest } = asked;
  const question = { words, where, order, down };
  const found = await get(path, question, signal);
  const { rollout: row, around } = found;
  const tab = TABS[asked.tab] ? asked.tab : "messages";
  const to = (other, more = {}) => link(run, "rollout", { ...question, ...rest, ...more }, other);
  const go = (other, more) => other !== null && other !== undefined
    && (location.hash = to(other, more));
  const own = found.siblings.findIndex((one) => one.rollout_id === row.rollout_id);
  const beside = (by) => found.siblings.length > 1
    && go(found.siblings.at((own + by) % found.siblings.length).rollout_id);
  bind({ j: () => go(around.after), k: () => go(around.before), "]": () => beside(1),
    "[": () => beside(-1), g: () => go(id, { tab: "siblings" }), t: () => go(id, { tab: "tokens" }),
    m: () => go(id, { tab: "messages" }),
    Escape: () => (location.hash = link(run, "rollouts", question)) });
  const place = h("div", {});
  const build = { messages, tokens, siblings, raw }[tab];
  const fill = async () => {
    try {
      place.replaceChildren(await build(found, { path, run, asked, go, to, signal, bind, early }));
      const target = document.getElementById(`message-${asked.at}`);
      target?.classList.add("at");
      target?.scrollIntoView();
    } catch (error) {
      if (!signal.aborted) place.replaceChildren(trouble(error));
    }
  };
  if (tab === "tokens" || tab === "siblings") {
    place.append(h("p", { class: "quiet" }, "Reading tokens…"));
  }
  const element = h("div", { class: "width" },
    h("div", { class: "top" },
      h("h1", {}, `Rollout ${row.rollout_id}`), verdictChip(row), statusChip(row),
      h("span", { class: "mono quiet" }, short(row.task_id || "", 90)),
      h("span", { class: "siblings", role: "navigation", "aria-label": "Siblings" },
        found.siblings.length > 1 ? h("span", { class: "quiet" }, "group ") : null,
        found.siblings.length > 1 ? found.siblings.slice(0, 64).map((one) => sibling(one, row, to))
          : null),
      h("span", { class: "siblings" },
        step("‹", "Previous rollout", around.before, to), around.at === null ? null
          : h("span", { class: "quiet" }, `${num(around.at + 1)} of ${num(around.of)}`),
        step("›", "Next rollout", around.after, to))),
    damage(found.damaged), verdictLine(found),
    h("nav", { class: "tabs", "aria-label": "Views of this rollout" }, Object.entries(TABS).map(
      ([name, title]) => h("a", { href: to(id, { tab: name }),
        "aria-current": name === tab ? "page" : null }, title))),
    h("div", { class: "sheet" }, place, side(found, path, run)));
  return { element, shown: fill };
}

// What was answered, and what the task expects, before anything is scrolled.
function verdictLine({ messages, expected }) {
  const answer = messages.findLast(({ role, content }) => role === "assistant" && content)?.content;
  if (!answer && !expected) return null;
  const part = (name, value) => (value ? h("span", {}, h("span", { class: "quiet" }, `${name} `),
    h("b", {}, short(value, 120))) : null);
  return h("p", { class: "answer" }, part("answer", answer), part("expected", expected));
}

function step(mark, what, target, to) {
  return target === null ? h("span", { class: "chip", "aria-hidden": true }, mark)
    : h("a", { class: "chip", href: to(target), "aria-label": what, title: what }, mark);
}

function sibling(one, row, to) {
  return h("a", { class: "chip", href: to(one.rollout_id), "aria-current":
    one.rollout_id === row.rollout_id ? "true" : null, title: `sample ${one.sample_index}: reward `
    + `${num(one.reward)}, ${one.stop_reason || one.status}, ${pluralize(one.num_sampled, "token")}` },
  `${one.sample_index} `, verdictGlyph(one));
}

// ---- beside it

function side(found, path, run) {
  const { rollout: row } = found;
  const facts = [["Reward", num(row.reward)],
    ...(row.reward_parts || []).map((p) => [`  ${p.name}`, `${num(p.value)} × ${num(p.weight)}`]),
    ["Stopped", row.stop_reason || "–"], ["Turns", num(row.num_turns)],
    ["Tool calls", num(row.num_tool_calls)],
    ...(row.continued_calls || row.rendered_calls ? [["Model endpoint", ["continued_calls",
      "rendered_calls", "forked_calls", "edited_replies", "unused_replies",
      "retokenization_mismatches", "image_placeholders"].filter((name) => row[name]).map((name) =>
      `${num(row[name])} ${name.replaceAll("_", " ")}`).join(", ")]] : []),
    ["Tokens", `${num(row.num_sampled)} of ${num(row.num_tokens)} sampled`],
    row.min_version === row.max_version ? ["Version", row.min_version < 0 ? "–" : row.min_version]
      : ["Versions", `${row.min_version} to ${row.max_version}`],
    ["Attempt", num(row.attempt)], ["Env", row.env], ["Agent", row.agent],
    ["Server", row.server || found.turns[0]?.backend || "–"], ["Worker", row.worker || "–"],
    ["Node", row.node || "–"], ["Stored", when(row.committed_at)]];
  const trained = found.trained.map((t) => h("li", {}, `step ${num(t.step)}, advantage `
    + `${num(t.advantage)}${t.loss === null ? "" : `, loss ${num(t.loss)}`}`));
  return h("aside", { class: "side", "aria-label": "About this rollout" },
    row.failure_code ? h("div", { class: "card" }, h("h2", {}, `${row.failure_class} failure`),
      h("p", {}, h("b", {}, row.failure_code), " ", row.failure_message)) : null,
    h("section", { class: "card" }, h("dl", {}, facts.map(([name, value]) =>
      [h("dt", {}, name), h("dd", {}, value)]))),
    times(row, found.attempts),
    trained.length ? h("section", { class: "card" }, h("header", {}, h("h2", {}, "Trained")),
      h("ul", {}, trained)) : null,
    notes(found, path, run));
}

function times(row, attempts) {
  const other = Math.max(0, row.run_s - row.llm_s - row.tool_s);
  // Until the last lease: with the attempts before it.
  const before = attempts.reduce((sum, one) => sum + one.seconds, 0);
  const parts = [["waiting", Math.max(0, row.queue_s - before)],
    ...(before ? [["failed attempts", before]] : []), ["INIT", row.init_s], ["model calls", row.llm_s],
    ["tools", row.tool_s], ["rest of RUN", other], ["EVAL", row.eval_s]].filter(([, value]) => value > 0);
  const all = Math.max(1e-9, ...parts.map(([, value]) => value || 0));
  return h("section", { class: "card" }, h("header", {}, h("h2", {}, "Where the time went")),
    h("div", { class: "bars" }, parts.map(([name, value]) => {
      const fill = h("span", { class: "fill" });
      fill.style.width = `${((value || 0) / all) * 100}%`;
      return h("div", { class: "bar" }, h("span", { class: "name" }, name),
        h("span", { class: "track" }, fill), h("span", { class: "value" }, seconds(value)));
    })));
}

function notes(found, path, run) {
  const list = h("div", {});
  const show = (rows) => list.replaceChildren(...rows.map((note) => h("p", {},
    h("span", { class: "chip warn" }, note.label), " ", note.value === null ? "" : num(note.value),
    " ", note.comment, " ", h("span", { class: "quiet" }, `${note.author}, ${when(note.created_at)}`))));
  show(found.annotations);
  const label = h("input", { placeholder: "label", "aria-label": "Label", size: "10" });
  const comment = h("input", { placeholder: "comment", "aria-label": "Comment" });
  comment.style.width = "100%";
  const write = async (given) => {
    try {
      const rollout_id = found.rollout.rollout_id;
      const said = await post(`${runPath(run)}/annotations`, { rollout_id, ...given });
      show(said.annotations);
      label.value = comment.value = "";
      say("Noted");
    } catch (error) {
      say(error.message);
    }
  };
  return h("section", { class: "card" }, h("header", {}, h("h2", {}, "Notes")), list,
    h("form", { onsubmit: (event) => {
      event.preventDefault();
      write({ label: label.value || "note", comment: comment.value });
    } }, comment, h("p", { class: "tools" }, label, h("button", {}, "Note"),
      h("button", { type: "button", onclick: () =>
        write({ label: "wrong-reward", comment: comment.value }) }, "Reward is wrong"))));
}

// ---- when what happened

const STRIP = { "failed attempts": "lost", INIT: "init", "model calls": "model", tools: "tool",
  "rest of RUN": "rest", EVAL: "eval" };

// From the lease to the commit. Durations are stored, no times of day: so calls stand one behind
// the other, and what lay between them stands behind the last.
function timeline(found) {
  const { rollout: row, attempts, turns } = found;
  const names = new Map(found.messages.filter(({ role }) => role === "assistant").map((message) =>
    [message.turn, parsed(message.tool_calls).map((call) => call.name || "?").join(", ")]));
  const calls = turns.flatMap(({ turn, completion_tokens, finish_reason, llm_s, tool_s }) => [
    ["model calls", llm_s, `turn ${turn}: model call, ${pluralize(completion_tokens, "token")}, `
      + finish_reason, turn],
    ["tools", tool_s, `turn ${turn}: tools ${names.get(turn) || ""}`, turn]]);
  const inside = calls.reduce((sum, [, value]) => sum + (value || 0), 0);
  const lost = attempts.map((each) => ["failed attempts", each.seconds,
    `attempt ${each.attempt} ended in ${stageOf(each)}: ${each.failure_code}`, undefined,
    `attempt ${each.attempt}`]);
  const parts = [...lost, ["INIT", row.init_s, "INIT: sandbox and task are prepared"], ...calls,
    ["rest of RUN", (row.run_s || 0) - inside, "RUN outside of model and tools"],
    ["EVAL", row.eval_s, "EVAL: the answer is graded"]].filter(([, value]) => value > 0);
  const all = parts.reduce((sum, [, value]) => sum + value, 0);
  if (!all) return null;
  const sums = Object.keys(STRIP).map((name) => [name, parts.filter(([kind]) => kind === name)
    .reduce((sum, [, value]) => sum + value, 0)]).filter(([, value]) => value);
  const waited = (row.queue_s || 0) - lost.reduce((sum, [, value]) => sum + value, 0);
  const strip = h("div", { class: "strip", role: "img", "aria-label": "Time line: " + sums.map(
    ([name, value]) => `${name} ${seconds(value)}`).join(", ") }, parts.map(
    ([kind, value, title, turn, label = kind]) => {
      const piece = h("span", { class: STRIP[kind], title: `${title} · ${seconds(value)}`,
        onclick: turn === undefined ? null : () => document.querySelector(
          `.message[data-turn="${turn}"]`)?.scrollIntoView({ behavior: "smooth" }) },
      value < all / 24 ? "" : turn === undefined ? label : kind === "tools" ? names.get(turn) || "tools"
        : `turn ${turn}`);
      piece.style.flexGrow = String(value / all);
      return piece;
    }));
  return h("section", { class: "timeline", "aria-label": "Time line" },
    h("p", { class: "legend" }, `${seconds(all)} from the lease to the commit`,
      waited > 0.0005 ? `, after ${seconds(waited)} of waiting` : "", sums.map(([name, value]) =>
        h("span", {}, h("s", { class: `strip-${STRIP[name]}` }, " "),
          ` ${name} ${seconds(value)}`))), strip);
}

// ---- messages

function messages(found, { asked, to, signal, bind }) {
  const transcript = transcriptOf(found, to);
  const { bar, search } = finder(transcript, asked.find ?? (asked.words || "").trim().split(/\s+/)[0],
    { bind, signal });
  const foldings = () => [...transcript.querySelectorAll(".folding")];
  const fold = foldings().length ? h("button", { type: "button", onclick: () => {
    const open = foldings().some((each) => each.classList.contains("folded"));
    foldings().forEach((each) => each.unfold(open));
  } }, "Unfold or fold all") : null;
  const whole = h("button", { type: "button", title: "All messages as text", onclick: () =>
    copy(asText(found), "Transcript").catch((error) => say(error.message)) }, "Copy transcript");
  bar.append(...[fold, found.messages.length ? whole : null].filter(Boolean));
  search();
  return h("div", {}, timeline(found), bar, transcript);
}

const asText = ({ rollout, messages }) => [`rollout ${rollout.rollout_id} · task ${rollout.task_id} · `
  + `reward ${num(rollout.reward)}`, ...messages.map((message) => [
  `[${message.role}${message.name ? ` ${message.name}` : ""}]`, message.reasoning, message.content,
  ...parsed(message.tool_calls).map((call) => (call.name
    ? `${call.name}(${JSON.stringify(call.arguments)})` : call.text))].filter(Boolean).join("\n"))]
  .join("\n\n");

function transcriptOf(found, to) {
  const made = [...found.attempts.map((one) => attempt(one, !found.messages.length)),
    ...played(found, to)];
  if (!found.messages.length && !found.attempts.length) {
    made.push(h("p", { class: "empty" }, "No message is stored."));
  }
  if (found.artifact) {
    made.push(h("article", { class: "message" }, h("header", {}, h("b", {}, "artifact"),
      "what was graded"), text(found.artifact, "")));
  }
  const task = found.task[0];
  if (task) {
    made.push(h("details", { class: "fold" }, h("summary", {}, "the task"),
      h("pre", {}, pretty(task.task))));
  }
  return h("div", { class: "transcript" }, made);
}

const stageOf = ({ stage }) => (stage ? stage.toUpperCase() : "–");

// An attempt that did not commit: why and where it ended, and what was played until then.
function attempt(one, open) {
  const where = [one.worker, one.node, one.server].filter(Boolean).join(" · ");
  return h("details", { class: "fold attempt", open },
    h("summary", {}, `attempt ${one.attempt} ended in ${stageOf(one)} after `
      + `${seconds(one.seconds)}: ${one.failure_class}/${one.failure_code}`),
    h("p", {}, one.failure_message || null, " ", h("span", { class: "quiet" },
      `${where} · ${pluralize(one.num_sampled, "token")} sampled`)), played(one));
}

// `to` makes links to a message; those of an attempt that failed have none.
function played(found, to = null) {
  const { rollout_id: id } = found.rollout || {};
  const turns = new Map(found.turns.map((turn) => [turn.turn, turn]));
  return found.messages.map((message) => {
    const own = message.role === "assistant";
    const turn = own ? turns.get(message.turn) : null;
    if (own) turns.delete(message.turn);
    const body = h("div", {});
    const show = (asStored) => body.replaceChildren(...(asStored ? [h("pre", {}, stored(message))]
      : said(message)));
    show(false);
    return h("article", { class: `message ${message.role}`, id: to && `message-${message.index}`,
      "data-turn": to && own ? message.turn : null }, h("header", {},
      h("b", {}, message.role), message.name || null,
      turn ? h("span", {}, `turn ${turn.turn} · ${pluralize(turn.completion_tokens, "token")} after `
        + `${num(turn.prompt_tokens)} · ${turn.finish_reason} · model ${seconds(turn.llm_s)}`
        + (turn.tool_s > 0 ? ` · tools ${seconds(turn.tool_s)}` : "")
        + (turn.policy_version < 0 ? "" : ` · version ${turn.policy_version}`)) : null,
      h("span", { class: "right" },
        to && turn ? h("a", { href: to(id, { tab: "tokens", turn: turn.turn }),
          title: "The exact tokens of this turn" }, "tokens") : null,
        toggle("raw", "The message as it is stored, every character visible", show),
        to ? h("a", { href: to(id, { at: message.index }), title: "Link to this message" },
          `#${message.index}`) : null)), body);
  });
}

function toggle(name, title, set) {
  const button = h("button", { type: "button", class: "small", title, "aria-pressed": "false",
    onclick: () => {
      const on = button.getAttribute("aria-pressed") === "false";
      button.setAttribute("aria-pressed", String(on));
      set(on);
    } }, name);
  return button;
}

function said(message) {
  return [message.reasoning ? h("details", { class: "fold" }, h("summary", {}, "reasoning, "
      + `${pluralize(message.reasoning.length, "character")}`), h("pre", {}, message.reasoning)) : null,
  message.content ? text(message.content, message.role === "tool" ? "term" : "") : null,
  ...calls(message.tool_calls)].filter(Boolean);
}

// As JSON, in which marks that turn or hide text are spelled out.
function stored(message) {
  const { run_id, rollout_id, ...rest } = message;
  return JSON.stringify({ ...rest, tool_calls: json(rest.tool_calls) }, null, 2)
    .replace(/[\p{Cf}\p{Co}\u007f-\u009f]/gu, (mark) =>
      "\\u" + mark.codePointAt(0).toString(16).padStart(4, "0"));
}

const DIFF = /^(diff --git|--- |\*\*\* |Index: )/m;

// What is long is folded; what is very long is not even laid out before somebody unfolds it.
function text(content, kind) {
  const laid = (part) => (DIFF.test(part) && part.includes("\n@@") ? diff(part)
    : kind === "term" ? terminal(part) : part);
  const body = h("pre", { class: kind }, laid(content.slice(0, LONG)));
  const count = content.split("\n").length;
  const [lines, chars] = kind === "term" ? [24, 2000] : [80, 6000];
  if (count <= lines && content.length <= chars) return body;
  const button = h("button", { type: "button", class: "small", onclick: () =>
    box.unfold(box.classList.contains("folded")) });
  const box = h("div", { class: "folding folded" }, body, button);
  box.content = content;
  box.whole = content.length <= LONG;
  box.lay = () => {
    if (!box.whole) body.replaceChildren(laid(content));
    box.whole = true;
  };
  box.unfold = (open) => {
    if (open) box.lay();
    box.classList.toggle("folded", !open);
    button.textContent = open ? "Fold" : `Show all ${pluralize(count, "line")}, ${pluralize(content.length, "character")}`;
    button.setAttribute("aria-expanded", String(open));
    if (kind === "term" && open) body.tabIndex = 0;
    else body.removeAttribute("tabindex");
  };
  box.unfold(false);
  return box;
}

function diff(content) {
  const kinds = { "+": "plus", "-": "minus", "@": "hunk" };
  return h("span", { class: "diff" }, content.split("\n").map((line) =>
    /^(---|\+\+\+) /.test(line) ? h("b", {}, line + "\n")
      : kinds[line[0]] ? h("span", { class: kinds[line[0]] }, line) : line + "\n"));
}

// Calls are what a policy wrote: nothing of their shape is certain.
function parsed(stored) {
  const list = json(stored || "[]");
  const isCall = (call) => call && typeof call === "object";
  return (Array.isArray(list) ? list : [stored]).map((call) => (isCall(call) ? { ...call, arguments:
    isCall(call.arguments) ? call.arguments : { arguments: String(call.arguments ?? "") } }
    : { text: String(call), arguments: {} }));
}

function json(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

function calls(stored) {
  return parsed(stored).map((call) => {
    const given = Object.entries(call.arguments).map(([name, value]) =>
      [name, typeof value === "string" ? value : JSON.stringify(value, null, 1)]);
    const brief = ([, value]) => given.length > 1 && value.length < 60 && !value.includes("\n");
    return h("div", { class: "call" }, h("header", {}, h("b", {}, call.name || "not a tool call"),
      given.filter(brief).map(([name, value]) => [h("span", { class: "quiet" }, name), value])),
    call.error ? h("p", { class: "trouble" }, call.error) : null,
    call.name ? given.filter((each) => !brief(each)).map(([name, value]) => [
      given.length > 1 ? h("div", { class: "key" }, name) : null, text(value, "")])
      : h("pre", {}, call.text || ""));
  });
}

function pretty(value) {
  const made = typeof value === "string" ? json(value) : value;
  return typeof made === "string" ? made : JSON.stringify(made, null, 2);
}

function raw(found) {
  const { around, ...rest } = found;
  return h("pre", {}, pretty(rest));
}

// ---- tokens

const SIGNALS = {
  mask: "trained or context", logprob: "logprob", advantage: "advantage × (1 − p)",
  version: "policy version", turn: "turn", learner: "learner − sampler",
};

// One entry a token, from spans and from lists of sampled tokens only.
function unroll(sequence) {
  const n = sequence.ids.length;
  const each = { n, kind: new Uint8Array(n), version: new Int32Array(n), turn: new Int32Array(n),
    logprob: new Float32Array(n).fill(NaN), learner: new Float32Array(n).fill(NaN) };
  let start = 0;
  let sampled = 0;
  sequence.span_end.forEach((end, i) => {
    each.kind.fill(sequence.span_kind[i], start, end);
    each.version.fill(sequence.span_version[i], start, end);
    each.turn.fill(sequence.span_turn[i], start, end);
    for (let t = start; t < end && sequence.span_kind[i]; t++, sampled++) {
      each.logprob[t] = sequence.logprobs[sampled];
      if (sequence.learner) each.learner[t] = sequence.learner[sampled];
    }
    start = end;
  });
  return each;
}

function level(value, most) {
  return Math.min(5, Math.round((Math.abs(value) / most) * 5));
}

function painter(signal, sequence, each, advantage) {
  const worst = { logprob: 4, advantage: 1, learner: 0.5 };
  return (t) => {
    if (signal === "mask") return `k${each.kind[t]} mask`;
    if (!each.kind[t]) return "k0";
    if (signal === "version") return `v${each.version[t] & 3}`;
    if (signal === "turn") return `v${each.turn[t] & 3}`;
    const value = signal === "logprob" ? each.logprob[t]
      : signal === "learner" ? each.learner[t] - each.logprob[t]
      : advantage * (1 - Math.exp(each.logprob[t]));
    if (isNaN(value) || !level(value, worst[signal])) return "";
    const hot = signal === "logprob" || value < 0;
    return (hot ? "h" : "c") + level(value, worst[signal]);
  };
}

function legend(signal) {
  const scale = (letter, words) => [5, 4, 3, 2, 1].map((n) => h("s", { class: letter + n }, " "))
    .concat(words);
  const said = {
    mask: [h("s", { class: "v0" }, "trained"), h("s", { class: "v1" }, "sampled, not trained"),
      "grey: context"],
    logprob: scale("h", "unlikely (−4 and below) to likely"),
    advantage: [...scale("h", "pushed down"), ...scale("c", "pushed up")],
    version: ["one colour a policy version"], turn: ["one colour a turn"],
    learner: [...scale("h", "learner finds it less likely (0.5 nat)"), ...scale("c", "more likely")],
  };
  return h("p", { class: "legend" }, said[signal]);
}

async function tokens(found, { asked, go, early, signal }) {
  const told = await early;
  if (!told.sequences.length) {
    return h("div", {}, damage(told.damaged), h("p", { class: "empty" },
      "No tokens: only completed rollouts have sequences."));
  }
  const mean = found.siblings.filter((s) => s.valid).map((s) => s.reward || 0);
  const centre = mean.reduce((a, b) => a + b, 0) / Math.max(1, mean.length);
  const colour = SIGNALS[asked.colour] ? asked.colour : "logprob";
  const learner = told.sequences.some((one) => one.learner);
  const pick = h("select", { "aria-label": "Colour by", onchange: () =>
    go(found.rollout.rollout_id, { colour: pick.value }) }, Object.entries(SIGNALS)
    .filter(([name]) => name !== "learner" || learner)
    .map(([name, title]) => h("option", { value: name }, title)));
  pick.value = colour;
  const about = h("div", { class: "about mono", "aria-live": "off" }, "Point at a token.");
  const made = told.sequences.map((sequence) => {
    const each = unroll(sequence);
    const advantage = sequence.advantage ?? (found.rollout.reward ?? 0) - centre;
    return h("section", {}, told.sequences.length > 1
      ? h("h2", { class: "section" }, `sequence ${sequence.segment} · ${sequence.lineage}`
        + (sequence.parent < 0 ? "" : ` of sequence ${sequence.parent}`)
        + ` · weight ${num(sequence.weight)}`) : null,
    h("p", { class: "quiet" }, figures(sequence, each, advantage)),
    flow(sequence, each, painter(colour, sequence, each, advantage), about, { mark:
      asked.turn === undefined ? -1 : each.turn.findIndex((turn, t) =>
        each.kind[t] && turn === Number(asked.turn)), signal }));
  });
  return h("div", {}, damage(told.damaged),
    told.tokenizer ? h("p", { class: "trouble" }, `Ids only: ${told.tokenizer}`) : null,
    h("p", { class: "tools" }, h("label", {}, "Colour by ", pick)), legend(colour), made, about);
}

function figures(sequence, each, advantage) {
  const sampled = sequence.logprobs.length;
  const sum = sequence.logprobs.reduce((a, b) => a + b, 0);
  const said = [`${pluralize(each.n, "token")}`, `${num(sampled)} sampled`];
  if (sampled) said.push(`mean logprob ${num(sum / sampled)}`);
  said.push(`advantage ${num(advantage)}${sequence.advantage === null
    ? " (reward minus the group's mean)" : ""}`);
  if (sequence.learner) {
    const gap = sequence.learner.map((value, i) => value - sequence.logprobs[i]);
    const most = gap.reduce((a, b) => Math.max(a, Math.abs(b)), 0);
    said.push(`learner − sampler: mean ${num(gap.reduce((a, b) => a + b, 0) / gap.length)}, `
      + `largest ${num(most)}`);
  }
  return said.join(" · ");
}

// Blocks of tokens: those out of sight are neither laid out nor painted (content-visibility).
// `mark` is a token that is scrolled to when its block is there.
function flow(sequence, each, paint, about, { from = 0, mark = -1, signal = null } = {}) {
  const place = h("div", { class: "tokens" });
  const fill = (start) => {
    const block = document.createElement("div");
    block.className = "block";
    for (let t = start; t < Math.min(each.n, start + PIECES); t++) {
      const piece = document.createElement("s");
      const text = sequence.texts[sequence.at[t]];
      piece.textContent = text === "" ? "·" : text === "\n" ? "⏎\n" : text;
      piece.className = paint(t);
      piece.dataset.t = t;
      block.append(piece);
    }
    place.append(block);
    if (mark >= start && mark < start + PIECES) {
      const piece = block.children[mark - start];
      piece.classList.add("at");
      setTimeout(() => signal?.aborted || piece.scrollIntoView({ block: "center" }), 100);
    }
  };
  let start = from;
  const some = (until) => {
    for (; start < each.n && performance.now() < until; start += PIECES) fill(start);
    if (start < each.n) setTimeout(() => some(performance.now() + 30), 0);
    else place.dataset.whole = "1";
  };
  some(performance.now() + 60);
  const point = (event) => {
    const t = Number(event.target.dataset?.t ?? NaN);
    if (!isNaN(t)) about.replaceChildren(...tell(sequence, each, t));
  };
  place.addEventListener("pointerover", point);
  return place;
}

function tell(sequence, each, t) {
  const said = { token: JSON.stringify(sequence.texts[sequence.at[t]]), id: sequence.ids[t],
    place: num(t) };
  if (each.kind[t]) {
    Object.assign(said, { logprob: num(each.logprob[t], 4),
      p: num(Math.exp(each.logprob[t])), turn: each.turn[t], version: each.version[t] });
    if (!isNaN(each.learner[t])) {
      said.learner = num(each.learner[t], 4);
      said["learner − sampler"] = num(each.learner[t] - each.logprob[t], 3);
    }
    if (each.kind[t] === 2) said.mask = "not trained";
  } else said.kind = "context";
  return Object.entries(said).map(([name, value]) => h("span", {}, `${name} `,
    h("b", {}, String(value))));
}

// ---- siblings

async function siblings(found, { run, asked, go, signal, path }) {
  const { rollout: row } = found;
  const others = found.siblings.filter((one) => one.rollout_id !== row.rollout_id);
  if (!others.length) return h("p", { class: "empty" }, "Its group has no other rollout.");
  const best = [...others].sort((a, b) => Math.abs(b.reward - row.reward)
    - Math.abs(a.reward - row.reward));
  const other = others.find((one) => String(one.rollout_id) === asked.beside) || best[0];
  const pick = h("select", { "aria-label": "Beside which sibling", onchange: () =>
    go(row.rollout_id, { beside: pick.value }) }, others.map((one) => h("option",
    { value: String(one.rollout_id) }, `sample ${one.sample_index}, reward ${num(one.reward)}`)));
  pick.value = String(other.rollout_id);
  const paths = [path, `${runPath(run)}/rollouts/${other.rollout_id}`];
  const [one, two] = await Promise.all(paths.map((p) => get(`${p}/tokens`, {}, signal)));
  if (!one.sequences.length || !two.sequences.length) {
    return h("div", {}, h("p", { class: "tools" }, pick), h("p", { class: "empty" },
      "One of the two has no tokens."));
  }
  const [a, b] = [one.sequences[0], two.sequences[0]];
  let same = 0;
  while (same < a.ids.length && same < b.ids.length && a.ids[same] === b.ids[same]) same++;
  const from = Math.max(0, same - 40);
  const about = h("div", { class: "about mono" }, "Point at a token.");
  const half = (sequence, title, rollout) => {
    const each = unroll(sequence);
    const paint = painter("logprob", sequence, each, 0);
    return h("div", {}, h("p", {}, h("b", {}, title), " ", verdictChip(rollout),
      h("span", { class: "quiet" }, ` ${pluralize(each.n, "token")}`)),
    flow(sequence, each, (t) => (t < same ? "k0" : (t === same ? "at " : "") + paint(t)), about,
      { from }));
  };
  return h("div", {}, h("p", { class: "tools" }, h("label", {}, "Beside ", pick),
    h("span", { class: "quiet" }, same === a.ids.length && same === b.ids.length
      ? `the same ${pluralize(same, "token")}` : `the first ${pluralize(same, "token is", "tokens are")} the same; they part in `
        + `turn ${unroll(a).turn[Math.min(same, a.ids.length - 1)]}`)), legend("logprob"),
  h("div", { class: "pair" },
    half(a, `this, sample ${row.sample_index}`, row),
    half(b, `sample ${other.sample_index}`, other)), about);
}
