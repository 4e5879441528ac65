"""The real scheduler and KV managers on a backend that computes nothing: what would happen, and how fast."""
