// Whose cells are picked out on the map: one request or one prefix at a time.

export class Selection {
  constructor() {
    this.key = null;
    this.listeners = [];
  }

  onChange(listener) {
    this.listeners.push(listener);
  }

  toggle(key) {
    this.key = this.key === key ? null : key;
    for (const listener of this.listeners) listener();
  }
}
