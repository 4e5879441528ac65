"""How models write tool calls and reasoning, and how answers are read back."""
