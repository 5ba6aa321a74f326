// A table of any length: only the rows in sight are elements, and only those near it are fetched.

import { h, num, say } from "./dom.js";

const PITCH = { 1: 30, 2: 48 }; // pixels of a row, by its lines of text
const SLIM = 600; // pixels, below which columns that are `wide` give way
const BLOCK = 200;
const TALLEST = 12e6; // browsers stop at about 30 million pixels

const kinds = ({ kind, wide, grows, wraps }) =>
  [kind, wide && "wide-only", (grows || wraps) && "text"].filter(Boolean).join(" ");

export class Table {
  // columns: [{name, title, width, grows, wraps, wide, show(row) -> node or text, sort}]; those that
  // grow share the room that is left; page(offset, limit) -> {total, rows}; text: lines of a row, 1 or 2
  constructor({ columns, page, open, sorted, label, text = 1 }) {
    Object.assign(this, { columns, page, open, sorted, total: 0, blocks: new Map(), at: -1 });
    this.pitch = PITCH[text];
    this.head = h("div", { class: "row head", role: "row" }, columns.map((c) => this.heading(c)));
    this.inner = h("div", { class: "inner", role: "rowgroup" });
    this.space = h("div", { class: "space", role: "presentation" }, this.inner);
    this.element = h("div",
      { class: `table lines${text}`, role: "grid", tabindex: "0", "aria-label": label },
      h("div", { role: "rowgroup", class: "heads" }, this.head), this.space);
    this.element.addEventListener("scroll", () => this.draw(), { passive: true });
    this.lay();
    this.observer = new ResizeObserver(() => {
      this.lay();
      this.draw();
    });
    this.observer.observe(this.element);
  }

  lay() {
    const slim = this.element.clientWidth < SLIM;
    this.element.classList.toggle("slim", slim);
    const columns = this.columns.filter((column) => !(slim && column.wide));
    const needed = columns.reduce((sum, column) => sum + column.width, 14);
    const growing = columns.filter((column) => column.grows).length;
    const more = growing ? Math.max(0, (this.element.clientWidth - needed) / growing) : 0;
    this.widths = columns.map(({ width, grows }) =>
      `${Math.floor(width + (grows ? more : 0))}px`).join(" ");
    this.head.style.gridTemplateColumns = this.widths;
  }

  heading(column) {
    const { order, down } = this.sorted || {};
    const mine = order === column.name;
    const sort = mine ? (down ? "descending" : "ascending") : "none";
    const mark = mine ? h("span", { class: "mark", "aria-hidden": true }, down ? "↓" : "↑") : null;
    const cell = { role: "columnheader", class: kinds(column), "aria-sort": sort,
      title: column.about || null };
    if (!column.sort) return h("div", cell, column.title);
    return h("div", cell, h("button", { onclick: () => column.sort() }, column.title, mark));
  }

  async start() {
    await this.load(0);
    this.draw();
  }

  async load(block) {
    if (this.blocks.has(block)) return;
    this.blocks.set(block, null);
    try {
      const found = await this.page(block * BLOCK, BLOCK);
      this.blocks.set(block, found.rows);
      if (found.total !== this.total || !block) {
        this.total = found.total;
        this.space.style.height = Math.min(this.total * this.pitch, TALLEST) + "px";
        this.element.setAttribute("aria-rowcount", this.total + 1);
      }
    } catch (error) {
      this.blocks.delete(block);
      throw error;
    }
    this.draw();
  }

  // Which row stands at a place of the scrolled space; beyond TALLEST a pixel is several rows.
  first() {
    const tall = this.total * this.pitch;
    const seen = Math.max(1, this.element.clientHeight - this.pitch);
    const share = this.element.scrollTop / Math.max(1, Math.min(tall, TALLEST) - seen);
    return tall <= TALLEST ? Math.floor(this.element.scrollTop / this.pitch)
      : Math.floor(share * Math.max(0, this.total - seen / this.pitch));
  }

  row(index) {
    return (this.blocks.get(Math.floor(index / BLOCK)) || [])[index % BLOCK];
  }

  draw() {
    const first = Math.max(0, this.first() - 4);
    const last = Math.min(this.total, first + Math.ceil(this.element.clientHeight / this.pitch) + 10);
    for (let block = Math.floor(first / BLOCK); block * BLOCK < last; block++) {
      if (!this.blocks.has(block)) this.load(block).catch((error) => say(error.message));
    }
    const top = this.total * this.pitch <= TALLEST ? first * this.pitch
      : Math.max(0, this.element.scrollTop - 4 * this.pitch);
    this.inner.style.transform = `translateY(${top}px)`;
    this.inner.replaceChildren(...Array.from({ length: Math.max(0, last - first) },
      (_, i) => this.line(first + i)));
  }

  line(index) {
    const row = this.row(index);
    const line = h("div", { class: "row" + (index === this.at ? " at" : ""), role: "row",
      "aria-rowindex": index + 2, "aria-selected": index === this.at },
    this.columns.map((column) => {
      const cell = h("div", { role: "gridcell", class: kinds(column) }, row ? column.show(row) : "");
      if (cell.textContent.length > 18) cell.title = cell.textContent;
      return cell;
    }));
    line.style.gridTemplateColumns = this.widths;
    line.addEventListener("click", (event) => {
      if (row && !event.target.closest("a, button")) this.open(row);
    });
    return line;
  }

  move(by) {
    this.show(Math.min(this.total - 1, Math.max(0, this.at + by)));
  }

  show(index) {
    this.at = index;
    const seen = this.element.clientHeight - 2 * this.pitch;
    const top = this.total * this.pitch <= TALLEST ? index * this.pitch : (index / this.total) * TALLEST;
    const { scrollTop } = this.element;
    if (top < scrollTop || top > scrollTop + seen) this.element.scrollTop = top - seen / 2;
    this.draw();
    const row = this.row(index);
    if (row && row.rollout_id !== undefined) say(`Row ${num(index + 1)}: rollout ${row.rollout_id}`);
  }

  enter() {
    if (this.row(this.at)) this.open(this.row(this.at));
  }
}
