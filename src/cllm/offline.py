"""The same engine without `await` and without HTTP: for scripts and notebooks."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cllm.asking import open_question
from cllm.backends.base import PromptScores
from cllm.config import load_config
from cllm.dialect.answer import ChatAnswer, ToolCall
from cllm.dialect.tools import Tool, read_tools
from cllm.embedding import Embeddings, shortened
from cllm.engine.params import SamplingParams
from cllm.engine.sampling import TokenLogprob
from cllm.errors import CLLMError, InvalidRequestError, ShuttingDownError
from cllm.generation import Delta, Generation, Timings
from cllm.llm import AsyncLLM
from cllm.structured.matcher import Grammar

T = TypeVar("T")
Prompt = str | Sequence[int]


@dataclass(slots=True)
class Completion:
    """One answer, whole."""

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    logprobs: list[TokenLogprob] | None
    timings: Timings
    prompt_logprobs: PromptScores | None = None
    """Of the prompt's tokens, from the second one on, with `SamplingParams.prompt_logprobs`."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    reasoning: str = ""
    """Told apart from the text where tools were given."""


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
        """Answers in the order of the prompts; with `params.n` > 1 the answers to one prompt stand together.

        `SamplingParams()` means what it says, whatever the model; without `params` the model's own defaults hold.
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
        """The assistant's next message. `tools` are in OpenAI's form; a message with calls has the finish_reason
        `tool_calls`, and is followed by a message of the role `tool` for each of them."""
        if tools:
            return self._wait(self._chat(messages, params or SamplingParams.with_model_defaults(), read_tools(tools)))
        return self.generate([self._llm.encode_chat(messages, params)], params, progress=False)[0]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """Text as it comes. Leaving the loop early cancels the rest."""
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
        """Each text as a row of length 1; `dimensions`: only so many of the first ones."""
        return self._wait(self._embed_all(_as_list(texts), dimensions))

    def kv(self) -> dict[str, Any]:
        """The cache as it is, as `GET /kv` shows it."""
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

    # -- inside ------------------------------------------------------------------------------------------------

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._begin(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """On the loop's thread, which must be there: nobody would ever answer otherwise."""
        refusal: CLLMError | None = None
        if self._process != os.getpid():
            refusal = CLLMError(
                f"this LLM belongs to process {self._process}, and its threads are not in this one, "
                "which was forked from it; make an LLM in each process"
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
        # As many as the queue takes at once; the rest are submitted as others finish.
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
        question = await open_question(self._llm, messages, replace(params, n=1), tools)
        (completion,) = await self._collect(question.submit(), question.params)
        answer = ChatAnswer()
        for piece in (*question.reader.push(completion.text), *question.reader.finish()):
            answer.add(piece)
        return replace(
            completion,
            text=answer.text,
            tool_calls=answer.calls,
            reasoning=answer.reasoning,
            finish_reason=question.reader.finish_reason(completion.finish_reason),
        )

    async def _complete(self, prompt: Prompt, params: SamplingParams) -> list[Completion]:
        return await self._collect(self._llm.submit(prompt, params, grammar=await self._compile(params)), params)

    async def _collect(self, generation: Generation, params: SamplingParams) -> list[Completion]:
        async with generation:
            pieces: list[list[Delta]] = [[] for _ in range(params.n)]
            async for delta in generation:
                pieces[delta.index].append(delta)
        return [
            Completion(
                text="".join(delta.text for delta in deltas),
                token_ids=[token for delta in deltas for token in delta.token_ids],
                finish_reason=deltas[-1].finish_reason or "",
                prompt_tokens=len(generation.prompt_ids),
                cached_tokens=generation.cached_tokens,
                logprobs=None
                if params.logprobs is None
                else [logprob for delta in deltas for logprob in delta.logprobs or []],
                timings=generation.timings,
                prompt_logprobs=generation.prompt_scores,
            )
            for deltas in pieces
        ]

    async def _compile(self, params: SamplingParams | None) -> Grammar | None:
        """Those of earlier prompts are kept: only the first one waits."""
        structure = None if params is None else params.structured
        return None if structure is None else await self._llm.compile(structure)

    async def _embed_all(self, texts: Sequence[Prompt], dimensions: int | None) -> NDArray[np.float32]:
        if (reason := self._llm.reads.no_embeddings) is not None:
            raise InvalidRequestError(reason, "model")
        size = self._llm.shape.n_embd
        if dimensions is not None and not 1 <= dimensions <= size:
            raise InvalidRequestError(f"dimensions is {dimensions}; it must be 1 to {size}", "dimensions")
        encode = self._llm.reads.encode_input
        ids = [encode(text) if isinstance(text, str) else text for text in texts]
        vectors = await Embeddings(self._llm, ids).compute()
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
