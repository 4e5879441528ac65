"""`LLM`: the engine without `await` and without HTTP, for scripts and notebooks."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cllm.config import load_config
from cllm.dialect.tools import Tool, read_tools
from cllm.engine.params import SamplingParams
from cllm.errors import CLLMError, InvalidRequestError, ShuttingDownError
from cllm.generation import Completion
from cllm.llm import AsyncLLM
from cllm.structured.matcher import Grammar
from cllm.tasks.chat import prepare_chat
from cllm.tasks.embedding import EmbeddingJob, shortened

T = TypeVar("T")
Prompt = str | Sequence[int]


class LLM:
    """A loaded model. `with LLM("smollm2") as llm: llm.generate("Once upon a time")`.

    `settings` takes the keys of the configuration file by their dotted names.
    """

    def __init__(
        self,
        model: str = "smollm2",
        *,
        backend: str = "auto",
        config: Path | str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        overrides = {"model.name": model, "backend.type": backend, **(settings or {})}
        loaded = load_config(Path(config) if config is not None else None, overrides)
        self._process = os.getpid()
        self._llm = AsyncLLM(loaded.config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cllm-offline", daemon=True)
        self._thread.start()
        try:
            self._wait(self._llm.start())
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        progress: bool = True,
    ) -> list[Completion]:
        """Answers in the order of the prompts; with `params.n` > 1, all answers to a prompt in a row.

        Without `params`, the model's own sampling defaults are used; `SamplingParams()` overrides them.
        """
        many = _as_list(prompts)
        params = params or SamplingParams.with_model_defaults()
        with _progress_bar(shown=progress and len(many) > 1) as bar:
            task = bar.add_task("generating", total=len(many))
            groups = self._wait(self._generate_all(many, params, lambda: bar.advance(task)))
        return [completion for group in groups for completion in group]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Completion:
        """The assistant's next message. `tools` are in OpenAI's format. If the answer's finish_reason is `tool_calls`,
        continue with one message of role `tool` per call."""
        _check_one_answer(params, "chat")
        if tools:
            return self._wait(self._chat(messages, params or SamplingParams.with_model_defaults(), read_tools(tools)))
        prompt = self._wait(self._llm.encode_chat(messages, params))
        return self.generate([prompt], params, progress=False)[0]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """Yields text as it is generated. Leaving the loop early cancels the rest."""
        _check_one_answer(params, "stream")
        pieces: queue.SimpleQueue[str | Exception | None] = queue.SimpleQueue()
        task = self._begin(self._pump(prompt, params, pieces))
        try:
            while (piece := pieces.get()) is not None:
                if isinstance(piece, Exception):
                    raise piece
                yield piece
        finally:
            task.cancel()

    def embed(self, texts: Prompt | Sequence[Prompt], *, dimensions: int | None = None) -> NDArray[np.float32]:
        """One normalised row per text, cut to the first `dimensions` if given."""
        return self._wait(self._embed_all(_as_list(texts), dimensions))

    def kv(self) -> dict[str, Any]:
        """The state of the KV cache, as in `GET /kv`."""
        return self._llm.kv()

    def close(self) -> None:
        if self._loop.is_closed() or self._process != os.getpid():
            return
        self._llm.release()
        self._wait(self._llm.shutdown(0))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- internals ---------------------------------------------------------------------------------------------

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._begin(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run it on the loop's thread. Raises if that is gone, since nothing would ever answer."""
        refusal: CLLMError | None = None
        if self._process != os.getpid():
            refusal = CLLMError(
                f"this LLM belongs to process {self._process}; a forked process does not have its threads; "
                "make an LLM in each process"
            )
        elif self._loop.is_closed():
            refusal = ShuttingDownError("this LLM is closed")
        if refusal is not None:
            work.close()
            raise refusal
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _generate_all(
        self, prompts: Sequence[Prompt], params: SamplingParams, done: Any
    ) -> list[list[Completion]]:
        # As many at once as the queue holds; the rest are submitted as others finish.
        limit = asyncio.Semaphore(self._llm.config.scheduler.max_queue)

        async def one(prompt: Prompt) -> list[Completion]:
            async with limit:
                completions = await self._complete(prompt, params)
            done()
            return completions

        tasks = [asyncio.ensure_future(one(prompt)) for prompt in prompts]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams, tools: Sequence[Tool]
    ) -> Completion:
        turn = await prepare_chat(self._llm, messages, params, tools)
        (completion,) = await turn.submit().collect(turn.reader)
        return completion

    async def _complete(self, prompt: Prompt, params: SamplingParams) -> list[Completion]:
        return await self._llm.submit(prompt, params, grammar=await self._compile(params)).collect()

    async def _compile(self, params: SamplingParams | None) -> Grammar | None:
        """Compiled once: later prompts find it in the compiler's cache."""
        structure = None if params is None else params.structured
        return None if structure is None else await self._llm.compile(structure)

    async def _embed_all(self, texts: Sequence[Prompt], dimensions: int | None) -> NDArray[np.float32]:
        if (reason := self._llm.embedder.no_embeddings) is not None:
            raise InvalidRequestError(reason, "model")
        size = self._llm.shape.n_embd
        if dimensions is not None and not 1 <= dimensions <= size:
            raise InvalidRequestError(f"dimensions is {dimensions}; it must be 1 to {size}", "dimensions")
        encode = self._llm.embedder.encode_text
        ids = [encode(text) if isinstance(text, str) else text for text in texts]
        vectors = await EmbeddingJob(self._llm, ids).compute()
        if not vectors:
            return np.empty((0, dimensions or size), np.float32)
        return np.stack([shortened(vector, dimensions) for vector in vectors])

    async def _pump(
        self, prompt: Prompt, params: SamplingParams | None, pieces: queue.SimpleQueue[str | Exception | None]
    ) -> None:
        try:
            grammar = await self._compile(params)
            async with self._llm.submit(prompt, params, grammar=grammar) as generation:
                async for delta in generation:
                    if delta.text:
                        pieces.put(delta.text)
            pieces.put(None)
        except Exception as error:
            pieces.put(error)


def _check_one_answer(params: SamplingParams | None, method: str) -> None:
    if params is not None and params.n > 1:
        raise InvalidRequestError(f"n is {params.n}; {method} gives one answer, only generate gives several", "n")


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]  # one prompt, given as token ids
    return list(prompts)  # type: ignore[arg-type]


def _progress_bar(*, shown: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        disable=not shown,
        transient=True,
    )
