// The API key: asked for when the server wants one, kept for as long as the tab is open.

import { byId, setText } from "./dom.js";

const NAME = "cllm-api-key";

export const key = {
  get value() {
    return sessionStorage.getItem(NAME);
  },

  headers() {
    return this.value ? { authorization: `Bearer ${this.value}` } : {};
  },

  /** Ask for a key; resolves once one was typed in. */
  ask() {
    const dialog = byId("key-dialog");
    const field = byId("key");
    setText(byId("key-error"), this.value ? "The server does not take this key." : "");
    field.value = "";
    if (!dialog.open) dialog.showModal();
    field.focus();
    return new Promise((resolve) => {
      byId("key-form").onsubmit = (submitted) => {
        submitted.preventDefault();
        sessionStorage.setItem(NAME, field.value);
        dialog.close();
        this.show();
        resolve();
      };
    });
  },

  show() {
    byId("forget-key").hidden = !this.value;
  },

  forget() {
    sessionStorage.removeItem(NAME);
    location.reload();
  },
};

byId("forget-key").addEventListener("click", () => key.forget());
// Without a key there is nothing to see behind the dialog.
byId("key-dialog").addEventListener("cancel", (event) => event.preventDefault());
key.show();
