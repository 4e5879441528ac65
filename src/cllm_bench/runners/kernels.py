"""One engine of `cllm bench kernels`, so that it shares no interpreter, threads or memory with what it is compared to.

    python -m cllm_bench.runners.kernels '{"engine": "native", "model": "file.gguf", "threads": 2, ...}'

A request is `{"do": name, **arguments}`: the answer is the result of that method of the engine.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from cllm_bench.runners import Handler, answer_lines


def make_engine(engine: str, **settings: Any) -> Any:
    """Each engine is imported only where it is asked for: not all need be installed."""
    if engine == "native":
        from cllm_bench.kernels.native import NativeEngine

        return NativeEngine(**settings)
    if engine == "llama":
        from cllm_bench.kernels.llama import LlamaEngine

        return LlamaEngine(**settings)
    from cllm_bench.kernels.genai import GenaiEngine

    return GenaiEngine(**settings)


def start() -> tuple[dict[str, Any], Handler]:
    engine = make_engine(**json.loads(sys.argv[1]))

    def answer(do: str, **arguments: Any) -> dict[str, Any]:
        found: dict[str, Any] = getattr(engine, do)(**arguments)
        return found

    return engine.describe(), answer


if __name__ == "__main__":
    answer_lines(start)
