"""What a benchmark raises."""

from __future__ import annotations

from cllm.errors import CLLMError


class BenchError(CLLMError):
    """A benchmark could not be run, or a server did not do what it was asked."""
