// Elements, numbers for people, and the one way to ask the server.
// What a model or a task wrote becomes text nodes here; nothing is ever parsed as HTML.

export function h(tag, given, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(given || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "open") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(3)) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  return element;
}

export function num(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (!Number.isFinite(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  if (size < 1e-3) return String(Number(value.toPrecision(digits)).toExponential());
  return String(Number(value.toPrecision(digits)));
}

export function big(value) {
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= size) return num(value / size) + " " + unit;
  }
  return num(value);
}

export const noun = (count, one, many = one + "s") => (count === 1 ? one : many);
export const pluralize = (count, one, many) => `${num(count)} ${noun(count, one, many)}`;

export const percent = (share) => (share === null || isNaN(share) ? "–" : num(share * 100) + " %");

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 5400) return num(value / 3600) + " h";
  if (value >= 90) return num(value / 60) + " min";
  return value >= 1 || value === 0 ? num(value) + " s" : num(value * 1000) + " ms";
}

export function when(value) {
  const date = typeof value === "number" ? new Date(value * 1000) : new Date(value);
  return value ? date.toISOString().slice(0, 16).replace("T", " ") : "–";
}

export function short(text, most = 80) {
  text = String(text);
  return text.length > most ? text.slice(0, most - 1) + "…" : text;
}

export const runPath = (run) => `/runs/${encodeURIComponent(run)}`;

export function card(title, content, more = null, wide = false) {
  return h("section", { class: "card" + (wide ? " wide" : "") },
    h("header", {}, h("h2", {}, title)), content, more);
}

export function quoted(value) {
  return typeof value === "number" ? String(value) : "'" + String(value).replaceAll("'", "''") + "'";
}

const frozen = document.getElementById("frozen");
export const FROZEN = frozen ? JSON.parse(frozen.textContent) : null;

// A file that was opened from a disk may keep nothing.
export function kept(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null;
  }
}

export function keep(name, value) {
  try {
    localStorage.setItem(name, value);
  } catch {
    return;
  }
}

function token() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    keep("token", given);
    history.replaceState(null, "", location.pathname + "#/");
  }
  return kept("token") || "";
}

const secret = FROZEN ? "" : token();
const headers = { authorization: "Bearer " + secret };

export async function get(path, asked = {}, signal = undefined) {
  const given = Object.entries(asked).filter(([, value]) => value !== "" && value !== undefined);
  const query = new URLSearchParams(given).toString();
  const address = path + (query ? "?" + query : "");
  if (FROZEN) {
    if (Object.hasOwn(FROZEN, path)) return FROZEN[path];
    throw new Error("This is a frozen copy, and it does not hold " + path);
  }
  return answer(await fetch("api" + address, { headers, signal }));
}

export async function post(path, body) {
  return answer(await fetch("api" + path, { method: "POST", headers, body: JSON.stringify(body) }));
}

async function answer(response) {
  const body = await response.json();
  if (!response.ok) {
    throw Object.assign(new Error(body.error || response.statusText), { status: response.status });
  }
  return body;
}

export async function listen(path, told, signal) {
  const response = await fetch("api" + path, { headers, signal });
  if (!response.ok) throw new Error((await response.json()).error);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = ""; ; ) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (text + value).split("\n\n");
    text = events.pop();
    for (const event of events) {
      if (event.startsWith("data: ")) told(JSON.parse(event.slice(6)));
    }
  }
}

// Addresses: #/RUN/PAGE/ID?where=...: the whole state, so that a copied link shows the same.

export function link(run, page = "", asked = {}, id = "") {
  const parts = [run, page, id].filter((part) => part !== "").map(encodeURIComponent);
  const given = Object.entries(asked).filter(([, v]) => v !== "" && v !== undefined && v !== null);
  const query = new URLSearchParams(given).toString();
  return "#/" + parts.join("/") + (query ? "?" + query : "");
}

export function here() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [run = "", page = "", id = ""] = path.split("/").map(decodeURIComponent);
  return { run, page, id, asked: Object.fromEntries(new URLSearchParams(query || "")) };
}

export function say(text) {
  const place = document.getElementById("said");
  place.textContent = text;
  clearTimeout(say.timer);
  say.timer = setTimeout(() => (place.textContent = ""), 4000);
}

export async function copy(text, what = "Link") {
  await navigator.clipboard.writeText(text);
  say(`${what} copied`);
}

// Resolves when what stands on the page is drawn, so that slower parts do not hold it up.
export const painted = () => new Promise((go) => requestAnimationFrame(() => setTimeout(go)));

// `again` asks once more; there is no button for what a person has to mend.
export function trouble(error, again = null) {
  const mended = [403, 404, 422].includes(error.status) || FROZEN || !again;
  return h("p", { class: "trouble", role: "alert" }, String(error.message || error),
    mended ? null : h("button", { type: "button", onclick: again }, "Try again"));
}

export function damage(found) {
  const parts = Object.entries(found || {});
  if (!parts.length) return null;
  return h("details", { class: "trouble", open: parts.length < 3 },
    h("summary", {}, `${pluralize(parts.length, "part")} of this run cannot be`
      + " read; everything else is shown"),
    h("ul", {}, parts.map(([name, what]) => h("li", {}, h("b", {}, name), " ", what))));
}
