"""K/V on disk: blocks by the names of their contents, shared by processes, private to the user (docs/kv-store.md)."""
