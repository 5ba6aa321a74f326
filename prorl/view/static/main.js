// The bar, the keys, and which page an address means.

import { FROZEN, copy, h, here, keep, kept, link, trouble } from "./dom.js";
import { redraw } from "./charts.js";
import { curvesPage } from "./curves.js";
import { figurePage, livePage, rolloutsPage, runPage, runsPage, sqlPage, tasksPage } from "./pages.js";
import { rolloutPage } from "./rollout.js";

const PAGES = {
  "": ["Overview", runPage], curves: ["Curves", curvesPage], rollouts: ["Rollouts", rolloutsPage], tasks: ["Tasks", tasksPage],
  sql: ["SQL", sqlPage], live: ["Live", livePage],
};
const KEYS = [
  ["j / k", "next / previous row or rollout"], ["Enter", "open the row"],
  ["[ / ]", "previous / next sibling of the group"], ["g", "siblings side by side"],
  ["m / t", "messages / tokens"], ["/", "to the filter; find in a rollout"],
  ["n / N", "next / previous match in a rollout"], ["Esc", "back to the table"],
  ["y", "copy a link to this view"], ["d", "dark or light"], ["?", "these keys"],
];

let keys = {};
let leave = new AbortController();

function bar({ run, page }) {
  const tabs = Object.entries(PAGES).filter(([name]) => !FROZEN || !["sql", "live", "tasks"].includes(name));
  const current = page === "rollout" ? "rollouts" : page;
  return [
    h("a", { class: "brand", href: "#/" }, "prorl"),
    run ? h("a", { class: "run", href: link(run), title: run }, run) : null,
    run ? h("nav", { "aria-label": "Pages of this run" }, tabs.map(([name, [title]]) =>
      h("a", { href: link(run, name), "aria-current": name === current ? "page" : null }, title)))
      : null,
    h("div", { class: "right" },
      FROZEN ? h("span", { class: "chip" }, "frozen copy")
        : h("button", { onclick: () => copy(location.href) }, "Copy link"),
      h("button", { onclick: theme, "aria-label": "Dark or light" }, "◐"),
      h("button", { onclick: help, "aria-label": "Keys" }, "?")),
  ];
}

async function show() {
  leave.abort();
  leave = new AbortController();
  keys = {};
  const { signal } = leave;
  const at = here();
  const place = document.getElementById("page");
  document.getElementById("bar").replaceChildren(...bar(at).filter(Boolean));
  document.querySelector("#bar [aria-current]")?.scrollIntoView({ inline: "center", block: "nearest" });
  document.title = [at.id && `rollout ${at.id}`, at.run, "prorl"].filter(Boolean).join(" · ");
  const build = !at.run ? runsPage : at.page === "rollout" ? rolloutPage
    : (PAGES[at.page] || PAGES[""])[1];
  try {
    const made = FROZEN?.figure ? figurePage(FROZEN.figure) : await build({ ...at, signal, bind: (more) => Object.assign(keys, more) });
    if (signal.aborted) return;
    place.className = made.whole ? "whole" : "";
    place.replaceChildren(made.element);
    made.shown?.();
  } catch (error) {
    if (!signal.aborted) place.replaceChildren(h("div", { class: "width" }, trouble(error, show)));
  }
  if (!signal.aborted) place.dataset.ready = location.hash;
}

function theme() {
  const now = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = now;
  keep("theme", now);
  redraw();
}

function help() {
  const box = h("dialog", { class: "dialog", "aria-label": "Keys" }, h("h1", {}, "Keys"),
    h("dl", {}, KEYS.map(([key, what]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)])),
    h("button", { onclick: () => box.close() }, "Close"));
  box.addEventListener("close", () => box.remove());
  document.body.append(box);
  box.showModal();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const writing = event.target.closest?.("input, textarea, select, dialog");
  if (writing) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const always = { "?": help, d: theme, y: () => copy(location.href) };
  const act = keys[event.key] || always[event.key];
  if (!act || (event.key === "Enter" && event.target.closest("a, button, summary"))) return;
  event.preventDefault();
  act();
});

const dark = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
document.documentElement.dataset.theme = kept("theme") || dark;
addEventListener("hashchange", show);
show();
