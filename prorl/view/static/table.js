// A table of any length: only the rows in sight are elements, and only those near it are fetched.

import { h, num, say } from "./dom.js";

const ROW = 30;
const BLOCK = 200;
const TALLEST = 12e6; // browsers stop at about 30 million pixels

export class Table {
  // columns: [{name, title, width, grows, show(row) -> node or text, sort}]; those that grow share
  // the room that is left; page(offset, limit) -> {total, rows}
  constructor({ columns, page, open, sorted, label }) {
    Object.assign(this, { columns, page, open, sorted, total: 0, blocks: new Map(), at: -1 });
    this.head = h("div", { class: "row head", role: "row" }, columns.map((c) => this.heading(c)));
    this.inner = h("div", { class: "inner", role: "rowgroup" });
    this.space = h("div", { class: "space", role: "presentation" }, this.inner);
    this.element = h("div",
      { class: "table", role: "grid", tabindex: "0", "aria-label": label }, 
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
    const needed = this.columns.reduce((sum, column) => sum + column.width, 14);
    const growing = this.columns.filter((column) => column.grows).length;
    const more = growing ? Math.max(0, (this.element.clientWidth - needed) / growing) : 0;
    this.widths = this.columns.map(({ width, grows }) =>
      `${Math.floor(width + (grows ? more : 0))}px`).join(" ");
    this.head.style.gridTemplateColumns = this.widths;
  }

  heading(column) {
    const { order, down } = this.sorted || {};
    const mine = order === column.name;
    const sort = mine ? (down ? "descending" : "ascending") : "none";
    const mark = mine ? h("span", { class: "mark", "aria-hidden": true }, down ? "↓" : "↑") : null;
    const cell = { role: "columnheader", class: column.kind || "", "aria-sort": sort,
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
        this.space.style.height = Math.min(this.total * ROW, TALLEST) + "px";
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
    const tall = this.total * ROW;
    const seen = Math.max(1, this.element.clientHeight - ROW);
    const share = this.element.scrollTop / Math.max(1, Math.min(tall, TALLEST) - seen);
    return tall <= TALLEST ? Math.floor(this.element.scrollTop / ROW)
      : Math.floor(share * Math.max(0, this.total - seen / ROW));
  }

  row(index) {
    return (this.blocks.get(Math.floor(index / BLOCK)) || [])[index % BLOCK];
  }

  draw() {
    const first = Math.max(0, this.first() - 4);
    const last = Math.min(this.total, first + Math.ceil(this.element.clientHeight / ROW) + 10);
    for (let block = Math.floor(first / BLOCK); block * BLOCK < last; block++) {
      if (!this.blocks.has(block)) this.load(block).catch((error) => say(error.message));
    }
    const top = this.total * ROW <= TALLEST ? first * ROW
      : Math.max(0, this.element.scrollTop - 4 * ROW);
    this.inner.style.transform = `translateY(${top}px)`;
    this.inner.replaceChildren(...Array.from({ length: Math.max(0, last - first) },
      (_, i) => this.line(first + i)));
  }

  line(index) {
    const row = this.row(index);
    const line = h("div", { class: "row" + (index === this.at ? " at" : ""), role: "row",
      "aria-rowindex": index + 2, "aria-selected": index === this.at },
    this.columns.map((column) => {
      const shown = row ? column.show(row) : "";
      return h("div", { role: "gridcell", class: column.kind || "",
        title: typeof shown === "string" && shown.length > 18 ? shown : null }, shown);
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
    const seen = this.element.clientHeight - 2 * ROW;
    const top = this.total * ROW <= TALLEST ? index * ROW : (index / this.total) * TALLEST;
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
