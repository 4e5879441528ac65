"""Requests become steps: states, scheduling, sampling, and the thread that owns them all."""
