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

  /** Ask for a key, and say why; true once one was typed in. With `mayChat`, a part of the page works without: false if
   * that is enough. */
  ask(why = "", mayChat = false) {
    const dialog = byId("key-dialog");
    const field = byId("key");
    const skip = byId("key-skip");
    setText(byId("key-error"), why || (this.value ? "The server does not take this key." : ""));
    skip.hidden = !mayChat;
    field.value = "";
    if (!dialog.open) dialog.showModal();
    field.focus();
    return new Promise((resolve) => {
      byId("key-form").onsubmit = (submitted) => {
        submitted.preventDefault();
        sessionStorage.setItem(NAME, field.value);
        dialog.close();
        this.show();
        resolve(true);
      };
      skip.onclick = () => {
        dialog.close();
        resolve(false);
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
