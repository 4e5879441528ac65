"""Model files that may be damaged, loaded in a process that may die of it."""

from __future__ import annotations

import multiprocessing
import resource
from array import array
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from cllm._native import Engine
from cllm.backends.base import Chunk
from cllm.backends.native import NativeBackend
from cllm.backends.native.loader import load_engine
from cllm.config import Config, load_config
from cllm.errors import CLLMError, ModelError
from cllm.kv.groups import LocalBlock, StateTable
from cllm.kv.ops import BlockGeometry
from cllm.loading.parts import ModelParts, load_model
from cllm.loading.text_model import PRELOADED
from cllm.models.gguf import GGUFModel
from cllm.text.chat_template import ChatTemplate
from cllm.text.template_source import load_chat_template
from cllm.text.tokenizer import load_tokenizer
from cllm.work.pool import blocking_workers

HANG_S = 60
ROOM_BYTES = 1 << 30
"""A file of some kilobytes that makes anyone ask for more is a failure."""
TEXT = "Hello, wörld! 123 <|im_end|>"


def next_logits(engine: Engine, n_vocab: int, tokens: list[int]) -> np.ndarray[Any, Any]:
    engine.allocate(cells=2, block_size=16, type_k="f16", type_v="f16")
    logits = np.full((1, n_vocab), np.nan, np.float32)
    chunk = np.array([[len(tokens), 0, 1, 1, 0, 0]], np.int32)
    assert engine.step(np.array(tokens, np.int32), chunk, np.array([1], np.int32), logits)
    return logits[0]


def compute_with_state(model: GGUFModel) -> None:
    """One token, whose state is kept."""
    with NativeBackend(model, threads=1, instruction_set="auto", kv_type_k="f16", kv_type_v="f16") as backend:
        layout = backend.spec.kv_layout("f16", "f16", 16, apart=False)
        cells = layout.states.cells if layout.states is not None else 0
        backend.allocate(BlockGeometry(1 + cells, 16, layout))
        state = StateTable()
        state.next = LocalBlock(list(range(1, 1 + cells)))
        backend.collect([Chunk(array("i", [0]), 0, 1, blocks=[0], state=state)])


def load_and_use(path: Path, *, with_text: bool) -> str:
    """Load a file, compute a token with it if it loads, and say what happened."""
    try:
        model = GGUFModel.open(path)
        if with_text:
            use_text(model)
        if model.spec.recurrent:
            compute_with_state(model)
        else:
            next_logits(load_engine(model, threads=1), model.spec.n_vocab, [0])
    except ModelError as error:
        return f"refused: {error}"
    except BaseException as error:
        return f"raised {error!r}"
    return "loaded"


def use_text(model: GGUFModel) -> None:
    tokenizer = load_tokenizer(model)
    tokenizer.decode(tokenizer.encode(TEXT, special=True))
    template = ChatTemplate.of(load_chat_template(model))
    with suppress(CLLMError):  # the model's own template may refuse a message
        template.encode(tokenizer, [{"role": "user", "content": TEXT}])


def _serve_loads(connection: Connection, with_text: bool) -> None:
    room = psutil.Process().memory_info().vms + ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    while path := connection.recv():
        connection.send(load_and_use(Path(path), with_text=with_text))


class LoadingProcess:
    """A process that loads files; one that dies or hangs is a failure, and is replaced."""

    def __init__(self, *, with_text: bool = False) -> None:
        self._with_text = with_text
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve_loads, args=(theirs, self._with_text), daemon=True)
        self._process.start()
        theirs.close()

    def outcome(self, path: Path) -> str:
        """ "loaded", "refused: " and why, or what should not have happened."""
        self._connection.send(str(path))
        try:
            if self._connection.poll(HANG_S):
                return str(self._connection.recv())
            answer = "hung"
        except EOFError:
            self._process.join(HANG_S)
            answer = f"died with exit code {self._process.exitcode}"
        self._process.kill()
        self._process.join()
        self._start()
        return answer

    def close(self) -> None:
        self._connection.send("")
        self._process.join(HANG_S)


def parts_of(file: Path, **settings: Any) -> Any:
    keys = {key.replace("__", "."): value for key, value in settings.items()}
    return load_parts(load_config(None, {"model.name": str(file), "backend.type": "native", **keys}).config)


def load_parts(config: Config) -> ModelParts:
    """Without an event loop."""
    with blocking_workers(config.work, PRELOADED) as workers:
        return load_model(config, workers)
