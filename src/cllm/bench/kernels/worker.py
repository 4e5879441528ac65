"""One engine in a process of its own, so that it shares no interpreter, threads or memory with what it is compared to.

    python -m cllm.bench.kernels.worker native '{"model": "file.gguf", "threads": 2, "instruction_set": "auto"}'

It prints a line of JSON when it is ready, then answers each line `{"do": name, "with": {arguments}}` with the result of
that method of its engine, or with `{"error": reason}`. It ends when its standard input does.
"""

from __future__ import annotations

import json
import os
import sys
from typing import IO, Any

from cllm.errors import CLLMError

ENGINES = ("native", "llama", "genai")


def make_engine(name: str, settings: dict[str, Any]) -> Any:
    """Each engine is imported only where it is asked for: not all need be installed."""
    if name == "native":
        from cllm.bench.kernels.native import NativeContender

        return NativeContender(**settings)
    if name == "llama":
        from cllm.bench.kernels.llama import LlamaContender

        return LlamaContender(**settings)
    from cllm.bench.kernels.genai import GenaiContender

    return GenaiContender(**settings)


def serve(engine: Any, requests: IO[str], answers: IO[str]) -> None:
    for line in requests:
        request = json.loads(line)
        answers.write(_answer(engine, request["do"], request["with"]) + "\n")
        answers.flush()


def _answer(engine: Any, do: str, arguments: dict[str, Any]) -> str:
    try:
        return json.dumps(getattr(engine, do)(**arguments))
    except (CLLMError, ValueError, MemoryError, RuntimeError, AttributeError) as error:
        return _failure(error)


def _failure(error: Exception) -> str:
    return json.dumps({"error": " ".join(str(error).split()) or type(error).__name__})


def main() -> None:
    # Libraries print to standard output as they like; the answers go where nobody else writes.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    name, settings = sys.argv[1], json.loads(sys.argv[2])
    try:
        engine = make_engine(name, settings)
        ready = json.dumps(engine.describe())
    except (CLLMError, ImportError, ValueError, RuntimeError) as error:
        print(_failure(error), file=answers, flush=True)
        return
    print(ready, file=answers, flush=True)
    serve(engine, sys.stdin, answers)


if __name__ == "__main__":
    main()
