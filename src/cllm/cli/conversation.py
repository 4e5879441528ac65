"""A conversation with a model: what was said, with which settings, and how it goes on."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cllm.asking import open_question
from cllm.cli import tuning
from cllm.cli.local import Answer, stream_message
from cllm.cli.spoken import Spoken
from cllm.dialect.tools import Tool, read_tools
from cllm.engine.params import ContextWindow, SamplingParams
from cllm.errors import CLLMError, InvalidRequestError
from cllm.kv.window import MIN_RECENT
from cllm.llm import AsyncLLM
from cllm.text.bounded import CONTEXT_LENGTH_EXCEEDED
from cllm.text.chat import PromptOptions
from cllm.text.messages import read_messages

Message = dict[str, Any]

_ROLES = ("system", "user", "assistant", "tool")
_MOST_FILE_BYTES = 64 << 20


class FullContextError(CLLMError):
    """The conversation does not fit the context any more."""


class Conversation:
    """The event loop runs only while an answer is being made."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, llm: AsyncLLM, settings: Mapping[str, Any], system: str | None
    ) -> None:
        self._loop = loop
        self._llm = llm
        self.system = system
        self.settings = dict(settings)
        self.tools: list[Tool] = []
        self.messages: list[Message] = []
        """All but the system message."""
        self._answers: list[Answer] = []

    @property
    def title(self) -> str:
        return f"{self._llm.model_name} on {self._llm.backend_name}"

    @property
    def max_context(self) -> int:
        return self._llm.max_context

    @property
    def params(self) -> SamplingParams:
        return tuning.checked(self.settings)

    def effective(self) -> dict[str, Any]:
        """Every parameter that can be set, as it holds now."""
        params = self.params.completed(self._llm.sampling_defaults.values)
        return {name: getattr(params, name) for name in tuning.NAMES}

    def set(self, name: str, value: str) -> None:
        """A value that cannot be changes nothing."""
        changed = dict(self.settings)
        if value == tuning.RESET:
            tuning.check_name(name)
            changed.pop(name, None)
        else:
            changed[name] = tuning.parse(name, value)
        self._llm.prompt_limit(tuning.checked(changed))  # is there such a window?
        self.settings = changed

    def roll(self) -> None:
        """From now on forget what is long ago: half of the context is for the most recent, the system message and the
        tools stay."""
        keep = 4
        if self.system or self.tools:
            beginning = self._start or [{"role": "user", "content": ""}]
            options = PromptOptions([tool.for_template() for tool in self.tools])
            keep = len(self._llm.encode_beginning(beginning, options=options))
        recent = max(self.max_context // 2 - keep, MIN_RECENT)
        changed = {**self.settings, "context_window": ContextWindow(recent, keep)}
        self._llm.prompt_limit(tuning.checked(changed))
        self.settings = changed

    def reset(self) -> None:
        self.messages = []

    # -- asking ------------------------------------------------------------------------------------------------

    def ask(self, text: str, write: Callable[[str], object]) -> Answer | None:
        """Hand the answer to `write` as it comes. None if Ctrl-C stopped it; what was said until then is remembered.

        A question that fails leaves the conversation as it was.
        """
        return self._go_on([*self._settled(), {"role": "user", "content": text}], write)

    def tell(self, results: Sequence[str], write: Callable[[str], object]) -> Answer | None:
        """The answer goes on with the results of the calls it ended with, in their order."""
        calls = self.messages[-1]["tool_calls"]
        told = [
            {"role": "tool", "tool_call_id": call["id"], "content": result}
            for call, result in zip(calls, results, strict=True)
        ]
        return self._go_on([*self.messages, *told], write)

    def retry(self, write: Callable[[str], object]) -> Answer | None:
        """Another answer to the last question."""
        last = self._last_question()
        if last is None:
            raise InvalidRequestError("there is no question to ask again", "messages")
        return self._go_on(self.messages[: last + 1], write)

    def _last_question(self) -> int | None:
        return next((at for at, said in reversed([*enumerate(self.messages)]) if said["role"] == "user"), None)

    def _settled(self) -> list[Message]:
        """What was said, without a question that led to calls whose results nobody told."""
        if self.messages and "tool_calls" in self.messages[-1]:
            return self.messages[: self._last_question()]
        return self.messages

    def _go_on(self, messages: list[Message], write: Callable[[str], object]) -> Answer | None:
        spoken = Spoken(write, self._llm.dialect.marks)
        task = self._loop.create_task(self._answer(messages, spoken))
        self._loop.add_signal_handler(signal.SIGINT, task.cancel)
        try:
            answer = self._loop.run_until_complete(task)
            self._answers.append(answer)
        except asyncio.CancelledError:
            answer = None
        finally:
            self._loop.remove_signal_handler(signal.SIGINT)
        self.messages = [*messages, spoken.message()]
        return answer

    async def _answer(self, messages: list[Message], spoken: Spoken) -> Answer:
        try:
            question = await open_question(self._llm, [*self._start, *messages], self.params, self.tools)
        except InvalidRequestError as error:
            if error.code == CONTEXT_LENGTH_EXCEEDED:
                raise FullContextError(str(error)) from error
            raise
        return await stream_message(question, spoken.take)

    @property
    def _start(self) -> list[Message]:
        return [{"role": "system", "content": self.system}] if self.system else []

    # -- files -------------------------------------------------------------------------------------------------

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self._llm.model_name,
            "messages": [*self._start, *self.messages],
            "settings": tuning.as_json(self.settings),
            **({"tools": [tool.as_json() for tool in self.tools]} if self.tools else {}),
            "answers": [answer.as_json() for answer in self._answers],
        }

    def save(self, file: Path) -> None:
        kept = {name: value for name, value in self.as_json().items() if name != "answers"}
        try:
            file.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise CLLMError(f"cannot write {file}: {error.strerror}") from error

    def load(self, file: Path) -> None:
        """A file that is not right changes nothing."""
        found = _read_json(file)
        if not isinstance(found, dict):
            raise CLLMError(f"{file} holds no conversation: it must be an object with messages, as /save writes it")
        try:
            messages = _messages(found.get("messages"))
            settings = tuning.from_json(found.get("settings", {}))
            tools = read_tools(found.get("tools", []))
        except InvalidRequestError as error:
            raise CLLMError(f"{file}: {error}") from error
        system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else None
        self.messages, self.settings, self.system, self.tools = messages, settings, system, tools

    def load_tools(self, file: Path) -> None:
        """A list of tools as OpenAI's API takes it, or an object with tools. A file that is not right changes
        nothing."""
        found = _read_json(file)
        try:
            self.tools = read_tools(found.get("tools") if isinstance(found, dict) else found)
        except InvalidRequestError as error:
            raise CLLMError(f"{file}: {error}") from error


def _read_json(file: Path) -> Any:
    try:
        if file.stat().st_size > _MOST_FILE_BYTES:
            raise CLLMError(f"{file} has more than {_MOST_FILE_BYTES >> 20} MiB, too much for a conversation")
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CLLMError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CLLMError(f"{file} is no JSON: {error}") from error


def _messages(found: object) -> list[Message]:
    if not isinstance(found, list):
        raise InvalidRequestError("messages must be a list", "messages")
    for number, message in enumerate(found):
        place = f"messages[{number}]"
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise InvalidRequestError(f"{place} must be an object whose role is one of {', '.join(_ROLES)}", place)
        if not isinstance(message.get("content"), str):
            raise InvalidRequestError(f"{place}.content must be text", place)
        if message["role"] == "system" and number:
            raise InvalidRequestError(f"{place} is a system message, which only the first may be", place)
    if found:
        read_messages(found)
    return found
