"""Programs that run in a process of their own: a peer's server, and engines without one.

Each prints one line of JSON when it is ready, and ends when its standard input does: none outlives the benchmark.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from typing import IO, Any

from cllm.errors import CLLMError

Handler = Callable[..., dict[str, Any]]
"""Gets the fields of a request."""


def answer_lines(start: Callable[[], tuple[dict[str, Any], Handler]]) -> None:
    """Print a line of JSON when ready, then answer each line of standard input with another.

    `start` gives the first line and what answers the others. Libraries print to standard output as they like; the
    answers go where nothing else writes.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        ready, answer = start()
    except (CLLMError, ImportError, ValueError, RuntimeError) as error:
        print(_failure(error), file=answers, flush=True)
        return
    print(json.dumps(ready), file=answers, flush=True)
    serve(answer, sys.stdin, answers)


def serve(answer: Handler, requests: IO[str], answers: IO[str]) -> None:
    for line in requests:
        try:
            text = json.dumps(answer(**json.loads(line)))
        except (CLLMError, ValueError, MemoryError, RuntimeError, AttributeError) as error:
            text = _failure(error)
        print(text, file=answers, flush=True)


def _failure(error: Exception) -> str:
    return json.dumps({"error": " ".join(str(error).split()) or type(error).__name__})


def end_with_stdin() -> None:
    """For programs that have a main loop of their own: watch standard input from a thread."""

    def watch() -> None:
        sys.stdin.buffer.read()
        os._exit(0)

    threading.Thread(target=watch, name="end-with-stdin", daemon=True).start()
