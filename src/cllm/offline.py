"""`LLM`: the engine without `await` and without HTTP, for scripts and notebooks."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cllm.config import load_config
from cllm.dialect.tools import Tool, read_tools
from cllm.engine.params import SamplingParams
from cllm.engine.submission import Submission
from cllm.errors import CLLMError, InvalidRequestError, ShuttingDownError
from cllm.generation import Completion
from cllm.llm import AsyncLLM
from cllm.loading.embedder import EMBEDDING
from cllm.structured.matcher import Grammar
from cllm.tasks.arguments import (
    Messages,
    Prompt,
    about,
    are_conversations,
    check_params,
    check_prompt,
    read_prompts,
)
from cllm.tasks.chat import PreparedChat, prepare_chat
from cllm.tasks.embedding import EmbeddingJob, shortened

T = TypeVar("T")
S = TypeVar("S")


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
        """Continue a text, given as such or as token ids, or a list of them. Returns answers in the order of the
        prompts; with `params.n` > 1, all answers to a prompt in a row.

        Without `params`, the model's own sampling defaults are used; `SamplingParams()` overrides them. Raises
        `InvalidRequestError` before anything is computed if a prompt cannot be used, too long ones included; of several
        it says which. `progress`: show a progress bar for several prompts.
        """
        check_params(params)
        many = read_prompts(prompts, "prompts")
        params = params or SamplingParams.with_model_defaults()
        encoded = self._wait(self._encode_all(many, params))
        with _progress_bar(shown=progress and len(many) > 1) as bar:
            task = bar.add_task("generating", total=len(many))
            work = self._each(encoded, lambda prompt: self._complete(prompt, params), lambda: bar.advance(task))
            groups = self._wait(work)
        return [completion for group in groups for completion in group]

    @overload
    def chat(
        self, messages: Messages, params: SamplingParams | None = None, *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> Completion: ...

    @overload
    def chat(
        self,
        messages: Sequence[Messages],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[Completion]: ...

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Completion | list[Completion]:
        """The assistant's next message in a conversation, which is a list of messages; for a list of conversations, a
        list of answers, which are computed together.

        `tools` are in OpenAI's format. If the answer's finish_reason is `tool_calls`, continue with one message of role
        `tool` per call. Raises `InvalidRequestError` if something cannot be used.
        """
        _check_one_answer(params, "chat")
        if not are_conversations(messages):
            return self._chat_all([messages], params, tools)[0]  # type: ignore[list-item]
        return self._chat_all(messages, params, tools)  # type: ignore[arg-type]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """Continue one text, and yield the answer's text as it is generated. Leaving the loop early cancels the rest.
        Raises `InvalidRequestError`, at the first step of the loop, if the prompt cannot be used."""
        _check_one_answer(params, "stream")
        check_prompt(prompt)
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
        """One normalised row per text, cut to the first `dimensions` if given. Raises `InvalidRequestError` before
        anything is computed if a text cannot be used; of several it says which."""
        return self._wait(self._embed_all(read_prompts(texts, "texts"), dimensions))

    def kv(self) -> dict[str, Any]:
        """The state of the KV cache, as in `GET /kv`."""
        return self._llm.executor.kv()

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

    def _chat_all(
        self, conversations: Sequence[Messages], params: SamplingParams | None, tools: Sequence[Mapping[str, Any]]
    ) -> list[Completion]:
        if tools:
            chosen, known = params or SamplingParams.with_model_defaults(), read_tools(tools)
            turns = self._wait(self._prepare_all(conversations, chosen, known))
            return self._wait(self._each(turns, self._answer))
        prompts = []
        for number, messages in enumerate(conversations):
            with about(_place("messages", number, conversations)):
                prompts.append(self._wait(self._llm.text.encode_chat(messages, params)))
        return self.generate(prompts, params, progress=False)

    async def _encode_all(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Sequence[int]]:
        encoded = []
        for number, prompt in enumerate(prompts):
            with about(_place("prompts", number, prompts)):
                encoded.append(self._llm.text.encode(prompt, params))
            await asyncio.sleep(0)  # other threads' work on this loop goes on
        return encoded

    async def _each(
        self, items: Sequence[S], work: Callable[[S], Awaitable[T]], done: Callable[[], object] = lambda: None
    ) -> list[T]:
        """As many at once as the queue holds; the rest are submitted as others finish."""
        limit = asyncio.Semaphore(self._llm.config.scheduler.max_queue)

        async def one(item: S) -> T:
            async with limit:
                result = await work(item)
            done()
            return result

        tasks = [asyncio.ensure_future(one(item)) for item in items]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _prepare_all(
        self, conversations: Sequence[Messages], params: SamplingParams, tools: Sequence[Tool]
    ) -> list[PreparedChat]:
        turns = []
        for number, messages in enumerate(conversations):
            with about(_place("messages", number, conversations)):
                turns.append(await prepare_chat(self._llm.text, messages, params, tools))
        return turns

    async def _answer(self, turn: PreparedChat) -> Completion:
        (completion,) = await self._llm.queue(turn.submission).collect(turn.readers[0])
        return completion

    async def _complete(self, prompt: Prompt, params: SamplingParams) -> list[Completion]:
        return await self._llm.submit(prompt, params, grammar=await self._compile(params)).collect()

    async def _compile(self, params: SamplingParams | None) -> Grammar | None:
        """Compiled once: later prompts find it in the compiler's cache."""
        structure = None if params is None else params.structured
        return None if structure is None else await self._llm.text.compile(structure)

    async def _embed_all(self, texts: Sequence[Prompt], dimensions: int | None) -> NDArray[np.float32]:
        if (reason := self._llm.text.embedder.no_embeddings) is not None:
            raise InvalidRequestError(reason, "model")
        size = self._llm.text.spec.n_embd
        if dimensions is not None and not (isinstance(dimensions, int) and 1 <= dimensions <= size):
            raise InvalidRequestError(f"dimensions is {dimensions!r}; it must be 1 to {size}", "dimensions")
        encode, ids = self._llm.text.embedder.encode_text, []
        for number, text in enumerate(texts):
            with about(_place("texts", number, texts)):
                ids.append(self._llm.text.encode(encode(text) if isinstance(text, str) else text, EMBEDDING))
        texts_to_embed = [Submission(each, EMBEDDING, embeds=True) for each in ids]
        vectors = await EmbeddingJob(self._llm, texts_to_embed).compute()
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
    check_params(params)
    if params is not None and params.n > 1:
        raise InvalidRequestError(f"n is {params.n}; {method} gives one answer, only generate gives several", "n")


def _place(name: str, number: int, items: Sequence[object]) -> str | None:
    return f"{name}[{number}]" if len(items) > 1 else None


def _progress_bar(*, shown: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        disable=not shown,
        transient=True,
    )
