// The only ways in which this page changes its document. Text is always text: nothing is ever parsed as HTML.

export const byId = (id) => document.getElementById(id);

/** Set text, and touch the document only if it is another one. */
export function setText(node, text) {
  const wanted = String(text);
  if (node.textContent !== wanted) node.textContent = wanted;
}

export function make(name, className = "", text = "") {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text) node.textContent = text;
  return node;
}

/** Rows of a table or list, kept by key: those that stay are updated in place, and moved only if their order changed. */
export class KeyedRows {
  constructor(parent, create, update) {
    this.parent = parent;
    this.create = create;
    this.update = update;
    this.rows = new Map();
  }

  show(items, keyOf) {
    const kept = new Map();
    let place = this.parent.firstChild;
    for (const item of items) {
      const key = keyOf(item);
      const row = this.rows.get(key) ?? this.create(item);
      this.rows.delete(key);
      kept.set(key, row);
      this.update(row, item);
      if (row.node === place) place = place.nextSibling;
      else this.parent.insertBefore(row.node, place);
    }
    for (const row of this.rows.values()) row.node.remove();
    this.rows = kept;
  }
}
