"""The real `AsyncLLM` on the fake backend, which says what the test says, when the test says."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np

from cllm.backends.base import Chunk, Logits
from cllm.backends.fake import END_TOKEN, FakeBackend
from cllm.config import Config
from cllm.engine.params import SamplingParams
from cllm.engine.submission import Submission
from cllm.errors import StepAbortedError
from cllm.executor import LocalExecutor
from cllm.generation import Generation
from cllm.llm import AsyncLLM
from cllm.structured.matcher import Grammar
from cllm.structured.structure import Structure
from cllm.text.chat_template import PLAIN, PromptOptions
from cllm.text.tokenizer import TokenLimit

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
LIMIT_S = 60.0
"""A guard against hanging, not a demand on speed."""


class Script:
    """The answer to every prompt, and how many steps may be computed."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.prompts: dict[bytes, None] = {}
        self._permits: int | None = None
        self._changed = threading.Condition()
        self.on_starved: Callable[[], None] = lambda: None
        self.wanted: Callable[[], bool] = lambda: True
        """Whether anybody waits for an answer."""

    def hold(self, steps: int) -> None:
        with self._changed:
            self._permits = steps

    def release(self, steps: int | None) -> None:
        with self._changed:
            self._permits = None if steps is None or self._permits is None else self._permits + steps
            self._changed.notify_all()

    def wait(self, aborted: threading.Event) -> None:
        """On the engine's thread, before each step."""
        with self._changed:
            if self._permits == 0:
                self.on_starved()
            while self._permits == 0:
                if aborted.is_set() or not self.wanted():
                    raise StepAbortedError("the step was aborted")
                self._changed.wait(0.002)
            if self._permits is not None:
                self._permits -= 1

    def next_token(self, context: bytes) -> int | None:
        answer = self.text.encode()
        for prompt in sorted(self.prompts, key=len, reverse=True):
            said = context[len(prompt) :]
            if context.startswith(prompt) and answer.startswith(said):
                return answer[len(said)] if len(said) < len(answer) else END_TOKEN
        return None


class ScriptedBackend(FakeBackend):
    """Logits as the fake backend's, but that the script's next token is the likeliest by far."""

    def __init__(self, script: Script, **options: Any) -> None:
        super().__init__(**options)
        self._script = script
        self.faults.before_step = lambda _: script.wait(self._aborted)

    def _row(self, chunk: Chunk, length: int) -> Logits:
        logits = super()._row(chunk, length)
        token = self._script.next_token(_as_bytes(self.memory.read(chunk, length)))
        if token is not None:
            logits[token] += 100
        return logits


def _as_bytes(tokens: Sequence[int]) -> bytes:
    """One byte for each token: of those that are none, the last one."""
    return np.minimum(np.asarray(tokens), 255).astype(np.uint8).tobytes()


class Scripted(AsyncLLM):
    """Answers every prompt with `text`, a byte a token. It runs while a client of it is open (`http_kit`).

    With `steps`, only so many steps are computed until `release`. `failure` is what `submit` raises or, with
    `fail_after`, what every request ends with after so many tokens.
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        text: str = "Hello, wörld!",
        max_context: int = 65,
        template: str = TEMPLATE,
        steps: int | None = None,
        failure: Exception | None = None,
        fail_after: int | None = None,
    ) -> None:
        settings = {} if config is None else config.model_dump(exclude_unset=True)
        defaults: dict[str, Any] = {
            "backend": {"type": "fake"},
            "model": {"alias": "tiny"},
            "resources": {"max_context_length": max_context},
            "drafts": {"enabled": False},
        }
        for section, values in defaults.items():
            settings[section] = {**values, **settings.get(section, {})}
        super().__init__(Config.model_validate(settings))
        self.script = Script(text)
        self.script.on_starved = self._on_starved
        self.script.wanted = lambda: bool(self._live)
        self.generations: list[Generation] = []
        self.submissions: list[Submission] = []
        self.asked: list[tuple[list[dict[str, Any]], PromptOptions]] = []
        self.compiled: list[Structure] = []
        self.submitted, self.starved = asyncio.Event(), asyncio.Event()
        self.failure, self.fail_after = failure, fail_after
        self._template = template
        self._users = 0
        if steps is not None:
            self.hold(steps)

    # -- what a test says ----------------------------------------------------------------------------------------

    @property
    def says(self) -> str:
        return self.script.text

    @says.setter
    def says(self, text: str) -> None:
        self.script.text = text

    def hold(self, steps: int = 0) -> None:
        """Compute only so many steps more; `starved` says that there is none left."""
        self.starved.clear()
        self.script.hold(steps)

    def release(self, steps: int | None = None) -> None:
        """Compute so many more, or all."""
        self.starved.clear()
        self.script.release(steps)

    def fail(self, failure: Exception, after: int | None = None) -> None:
        self.failure, self.fail_after = failure, after

    def mend(self) -> None:
        self.failure = None
        self.release()

    async def idle(self) -> None:
        """Wait until the engine has nothing left of any request."""
        deadline = time.monotonic() + LIMIT_S
        while self.requests() or any(map(_is_busy, self.engines)):
            assert time.monotonic() < deadline, "a request was left behind"
            await asyncio.sleep(0.001)

    @property
    def engines(self) -> Sequence[AsyncLLM]:
        """Whoever computes for it."""
        return [self]

    # -- life ----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While somebody uses it, who leaves no request behind. It may be started again after that."""
        self._users += 1
        try:
            if self._users == 1:
                await self.start()
            yield
            if self._users == 1:
                await self.idle()
        finally:
            self._users -= 1
            if self._users == 0:
                await self.shutdown(0)

    async def start(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "template.jinja")
            file.write_text(self._template, encoding="utf-8")
            self._loop = asyncio.get_running_loop()
            kept, executor = self.config, cast(Any, self.executor)
            model = kept.model.model_copy(update={"chat_template": file})
            self.config = executor._config = kept.model_copy(update={"model": model})
            context = max(4096, kept.resources.max_context_length or 0)
            make = partial(ScriptedBackend, self.script, context_length=context)
            with mock.patch("cllm.backends.fake.FakeBackend", make):
                await super().start()
            self.config = executor._config = kept
        self._watch_text()

    # -- work ----------------------------------------------------------------------------------------------------

    def queue(self, submission: Submission) -> Generation:
        if self.failure is not None:
            if self.fail_after is None:
                raise self.failure
            self.hold(self.fail_after)
        ids = submission.prompt
        if all(isinstance(each, int) and 0 <= each < 1 << 16 for each in ids):
            self.script.prompts[_as_bytes(ids)] = None
        generation = super().queue(submission)
        self.generations.append(generation)
        self.submissions.append(submission)
        self.submitted.set()
        return generation

    def _watch_text(self) -> None:
        text = self.text
        self._compile, self._encode_chat = text.compile, text.encode_chat
        text.compile, text.encode_chat = self.compile, self.encode_chat  # type: ignore[method-assign]

    async def compile(self, structure: Structure) -> Grammar:
        """What its text model compiles."""
        self.compiled.append(structure)
        return await self._compile(structure)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        options: PromptOptions = PLAIN,
        limit: TokenLimit | None = None,
    ) -> list[int]:
        """What its text model encodes."""
        self.asked.append(([dict(message) for message in messages], options))
        return await self._encode_chat(messages, params, options, limit)

    def _on_starved(self) -> None:
        """On the engine's thread."""
        self._loop.call_soon_threadsafe(self._say_starved)

    def _say_starved(self) -> None:
        self.starved.set()
        if self.failure is not None:
            for generation in self.generations:
                if not generation.done:
                    self.end_with(generation, self.failure)

    def end_with(self, generation: Generation, error: Exception) -> None:
        self.cancel(generation.request_id)
        generation.fail(error)


def _is_busy(llm: AsyncLLM) -> bool:
    state = LocalExecutor.snapshot(cast(LocalExecutor, llm.executor))
    return bool(state.running or state.waiting or state.kv.referenced)


class ScriptedLLM(Scripted):
    """With its engine in this process."""
