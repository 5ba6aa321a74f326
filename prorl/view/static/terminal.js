// What a program wrote to a terminal: its colours, without the codes that move a cursor.

import { h } from "./dom.js";

// CSI sequences (ECMA-48 5.4), OSC up to BEL or ST, and other escapes of two characters.
const CODES = /\x1b(?:\[([0-9;:?<=>]*)[ -/]*([@-~])|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])/g;

export function terminal(text) {
  if (!text.includes("\x1b")) return text;
  const pieces = [];
  let [colour, bold, from] = ["", "", 0];
  const add = (part) => part && pieces.push(colour || bold
    ? h("span", { class: `${colour} ${bold}` }, part) : part);
  for (const match of text.matchAll(CODES)) {
    add(text.slice(from, match.index));
    from = match.index + match[0].length;
    if (match[2] !== "m") continue;
    const codes = match[1].split(";").map(Number);
    for (let i = 0; i < codes.length; i++) {
      const code = codes[i];
      if (code === 0) [colour, bold] = ["", ""];
      else if (code === 1) bold = "strong";
      else if (code === 22) bold = "";
      else if (code === 39) colour = "";
      else if (code >= 30 && code < 38) colour = `ansi${code - 30}`;
      else if (code >= 90 && code < 98) colour = `ansi${code - 90}`;
      else if (code === 38 || code === 48) i += codes[i + 1] === 5 ? 2 : 4;
    }
  }
  add(text.slice(from));
  return h("span", {}, pieces);
}
