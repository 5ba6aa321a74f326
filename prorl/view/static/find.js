// Finds words in the text of a page, marks them, and goes from one to the next.

import { h, num } from "./dom.js";

const MOST = 5000; // matches that are marked and counted

// `text` has what is searched; its foldings open where a match is in them. Keys: / n N.
export function finder(text, first, { bind, signal }) {
  const box = h("input", { type: "search", class: "words", value: first || "", "aria-label":
    "Find in this rollout", placeholder: "find in this rollout   ( / )" });
  const count = h("span", { class: "quiet", role: "status" });
  let matches = [];
  let at = -1;
  const mark = () => {
    CSS.highlights?.set("find", new Highlight(...matches));
    CSS.highlights?.set("find-at", new Highlight(...matches.slice(at, at + 1)));
    const many = `${num(matches.length)}${matches.length === MOST ? "+" : ""}`;
    count.textContent = !box.value ? "" : at >= 0 ? `${num(at + 1)} of ${many}`
      : matches.length ? `${many} match${matches.length > 1 ? "es" : ""}` : "no match";
  };
  const search = () => {
    const needle = box.value.toLowerCase();
    if (needle) {
      for (const folding of text.querySelectorAll(".folding")) {
        if (!folding.whole && folding.content.toLowerCase().includes(needle)) folding.lay();
      }
    }
    [matches, at] = [needle ? ranges(text, needle) : [], -1];
    mark();
  };
  const go = (by) => {
    if (!matches.length) return;
    at = at < 0 && by < 0 ? matches.length - 1 : (at + by + matches.length) % matches.length;
    const inside = matches[at].startContainer.parentElement;
    for (let each = inside; each; each = each.parentElement) {
      if (each.tagName === "DETAILS") each.open = true;
      if (each.classList.contains("folding")) each.unfold(true);
    }
    const page = document.getElementById("page");
    for (const area of [inside.closest("pre"), page]) {
      if (!area) continue;
      const place = matches[at].getBoundingClientRect();
      area.scrollTop += place.top - area.getBoundingClientRect().top - area.clientHeight / 3;
    }
    mark();
  };
  const step = (by) => h("button", { type: "button", "aria-label": by < 0 ? "Previous match"
    : "Next match", title: by < 0 ? "Previous match ( N )" : "Next match ( n )",
  onclick: () => go(by) }, by < 0 ? "‹" : "›");
  const bar = h("form", { class: "tools find", role: "search", onsubmit: (event) => {
    event.preventDefault();
    go(1);
  } }, box, step(-1), step(1), count);
  box.addEventListener("input", search);
  box.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !event.shiftKey) return;
    event.preventDefault();
    go(-1);
  });
  bind({ "/": () => {
    box.focus();
    box.select();
  }, n: () => go(1), N: () => go(-1) });
  signal.addEventListener("abort", () => CSS.highlights?.clear());
  return { bar, search };
}

function ranges(text, needle) {
  const matches = [];
  const walker = document.createTreeWalker(text, NodeFilter.SHOW_TEXT, (node) =>
    (node.parentElement.closest("pre, .call > header") ? NodeFilter.FILTER_ACCEPT
      : NodeFilter.FILTER_REJECT));
  while (walker.nextNode() && matches.length < MOST) {
    const node = walker.currentNode;
    const lower = node.data.toLowerCase();
    // Some letters are two in lower case, and would move what follows.
    const words = lower.length === node.data.length ? lower : node.data;
    for (let i = words.indexOf(needle); i >= 0 && matches.length < MOST;
      i = words.indexOf(needle, i + needle.length)) {
      const range = new Range();
      range.setStart(node, i);
      range.setEnd(node, i + needle.length);
      matches.push(range);
    }
  }
  return matches;
}
