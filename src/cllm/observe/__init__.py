"""Metrics and logs. Reads snapshots, never takes a lock."""
