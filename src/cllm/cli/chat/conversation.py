"""A conversation with a model: its messages and settings, and how the next message is generated."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cllm.cli.chat import sampling
from cllm.cli.local import as_json
from cllm.dialect.deltas import ChatDelta, Delta, ReasoningDelta
from cllm.dialect.reasoning import Marks
from cllm.dialect.tools import Tool, read_tools
from cllm.engine.params import ContextWindow, SamplingParams
from cllm.errors import CLLMError, InvalidRequestError
from cllm.generation import Completion
from cllm.kv.window import MIN_RECENT
from cllm.llm import AsyncLLM
from cllm.tasks.chat import prepare_chat
from cllm.text.chat_template import PromptOptions
from cllm.text.messages import read_messages
from cllm.text.tokenizer import CONTEXT_LENGTH_EXCEEDED

Message = dict[str, Any]

_ROLES = ("system", "user", "assistant", "tool")
_MAX_FILE_BYTES = 64 << 20


class StreamedMessage:
    """An assistant message as it streams in: written piece by piece, and collected for the next prompt.

    Reasoning is written between the model's own marks. Tool calls are not: the session shows them.
    """

    def __init__(self, write: Callable[[str], object], marks: Marks | None) -> None:
        self._write = write
        self._marks = marks or Marks("", "")
        self._whole = Completion()

    def take(self, delta: ChatDelta) -> None:
        if isinstance(delta, ReasoningDelta):
            self._write(delta.text if self._whole.reasoning else f"{self._marks.begin}\n{delta.text}")
        elif isinstance(delta, Delta) and delta.text:
            ends_reasoning = self._whole.reasoning and not self._whole.text
            self._write(f"\n{self._marks.end}\n\n{delta.text}" if ends_reasoning else delta.text)
        self._whole.add(delta)

    def message(self) -> dict[str, Any]:
        """The whole message for the next prompt. Tool calls are included only if they are complete."""
        message: dict[str, Any] = {"role": "assistant", "content": self._whole.text}
        if self._whole.reasoning:
            message["reasoning_content"] = self._whole.reasoning
        if self._whole.finish_reason == "tool_calls":
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self._whole.tool_calls
            ]
        return message


class FullContextError(CLLMError):
    """The conversation no longer fits into the context."""


class Conversation:
    """The event loop runs only while an answer is generated."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, llm: AsyncLLM, settings: Mapping[str, Any], system: str | None
    ) -> None:
        self._loop = loop
        self._llm = llm
        self.system = system
        self.settings = dict(settings)
        self.tools: list[Tool] = []
        self.messages: list[Message] = []
        """Without the system message."""
        self._answers: list[Completion] = []

    @property
    def title(self) -> str:
        return f"{self._llm.model_name} on {self._llm.text.facts.traits.name}"

    @property
    def max_context(self) -> int:
        return self._llm.text.max_context

    @property
    def params(self) -> SamplingParams:
        return sampling.validate(self.settings)

    def effective(self) -> dict[str, Any]:
        """The current value of every parameter that can be set."""
        params = self.params.completed(self._llm.text.sampling_defaults.values)
        return {name: getattr(params, name) for name in sampling.NAMES} | {"context_window": self.window}

    @property
    def window(self) -> ContextWindow | None:
        """The rolling window in use: the one that was set, or the configured one."""
        asked = self.params.context_window
        if asked != "configured":
            return asked
        configured = self._llm.config.kv.window
        return None if configured.recent is None else ContextWindow(configured.recent, configured.keep)

    def set(self, name: str, value: str) -> None:
        """Raises, and changes nothing, if the value is invalid."""
        changed = dict(self.settings)
        if value == sampling.RESET:
            sampling.check_name(name)
            changed.pop(name, None)
        else:
            changed[name] = sampling.parse(name, value)
        self._llm.text.prompt_limit(sampling.validate(changed))  # raises if the window is too large
        self.settings = changed

    def use_rolling_window(self) -> None:
        """Switch to a rolling window: half of the context holds the most recent tokens, the system message and tools
        stay."""
        keep = 4
        if self.system or self.tools:
            beginning = self._start or [{"role": "user", "content": ""}]
            options = PromptOptions([tool.for_template() for tool in self.tools])
            keep = len(self._loop.run_until_complete(self._llm.text.encode_beginning(beginning, options=options)))
        recent = max(self.max_context // 2 - keep, MIN_RECENT)
        changed = {**self.settings, "context_window": ContextWindow(recent, keep)}
        self._llm.text.prompt_limit(sampling.validate(changed))
        self.settings = changed

    def reset(self) -> None:
        self.messages = []

    # -- asking ------------------------------------------------------------------------------------------------

    def ask(self, text: str, write: Callable[[str], object]) -> Completion | None:
        """Stream the answer to `write`. None if Ctrl-C stopped it; the text up to there stays in the conversation.

        A question that fails does not change the conversation.
        """
        return self._generate([*self._answered(), {"role": "user", "content": text}], write)

    def add_results(self, results: Sequence[str], write: Callable[[str], object]) -> Completion | None:
        """Continue the answer with the results of its tool calls, in their order."""
        calls = self.messages[-1]["tool_calls"]
        outputs = [
            {"role": "tool", "tool_call_id": call["id"], "content": result}
            for call, result in zip(calls, results, strict=True)
        ]
        return self._generate([*self.messages, *outputs], write)

    def retry(self, write: Callable[[str], object]) -> Completion | None:
        """Answer the last question again."""
        last = self._last_question()
        if last is None:
            raise InvalidRequestError("there is no question to answer again", "messages")
        return self._generate(self.messages[: last + 1], write)

    def _last_question(self) -> int | None:
        return next((at for at, message in reversed([*enumerate(self.messages)]) if message["role"] == "user"), None)

    def _answered(self) -> list[Message]:
        """The messages, without a last question whose tool calls got no results."""
        if self.messages and "tool_calls" in self.messages[-1]:
            return self.messages[: self._last_question()]
        return self.messages

    def _generate(self, messages: list[Message], write: Callable[[str], object]) -> Completion | None:
        streamed = StreamedMessage(write, self._llm.text.dialect.marks)
        task = self._loop.create_task(self._answer(messages, streamed))
        self._loop.add_signal_handler(signal.SIGINT, task.cancel)
        try:
            answer = self._loop.run_until_complete(task)
            self._answers.append(answer)
        except asyncio.CancelledError:
            answer = None
        finally:
            self._loop.remove_signal_handler(signal.SIGINT)
        self.messages = [*messages, streamed.message()]
        return answer

    async def _answer(self, messages: list[Message], streamed: StreamedMessage) -> Completion:
        try:
            question = await prepare_chat(self._llm.text, [*self._start, *messages], self.params, self.tools)
        except InvalidRequestError as error:
            if error.code == CONTEXT_LENGTH_EXCEEDED:
                raise FullContextError(str(error)) from error
            raise
        (completion,) = await self._llm.queue(question.submission).collect(question.readers[0], streamed.take)
        return completion

    @property
    def _start(self) -> list[Message]:
        return [{"role": "system", "content": self.system}] if self.system else []

    # -- files -------------------------------------------------------------------------------------------------

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self._llm.model_name,
            "messages": [*self._start, *self.messages],
            "settings": sampling.as_json(self.settings),
            **({"tools": [tool.as_json() for tool in self.tools]} if self.tools else {}),
            "answers": [as_json(answer) for answer in self._answers],
        }

    def save(self, file: Path) -> None:
        kept = {name: value for name, value in self.as_json().items() if name != "answers"}
        try:
            file.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise CLLMError(f"cannot write {file}: {error.strerror}") from error

    def load(self, file: Path) -> None:
        """Raises, and changes nothing, if the file is invalid."""
        found = _read_json(file)
        if not isinstance(found, dict):
            raise CLLMError(
                f"{file} is not a saved conversation: expected a JSON object with messages, as /save writes it"
            )
        try:
            messages = _messages(found.get("messages"))
            settings = sampling.from_json(found.get("settings", {}))
            tools = read_tools(found.get("tools", []))
        except InvalidRequestError as error:
            raise CLLMError(f"{file}: {error}") from error
        system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else None
        self.messages, self.settings, self.system, self.tools = messages, settings, system, tools

    def load_tools(self, file: Path) -> None:
        """Load a list of tools in OpenAI's format, or an object with "tools". Raises if the file is invalid."""
        found = _read_json(file)
        try:
            self.tools = read_tools(found.get("tools") if isinstance(found, dict) else found)
        except InvalidRequestError as error:
            raise CLLMError(f"{file}: {error}") from error


def _read_json(file: Path) -> Any:
    try:
        if file.stat().st_size > _MAX_FILE_BYTES:
            raise CLLMError(f"{file} is larger than {_MAX_FILE_BYTES >> 20} MiB")
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CLLMError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CLLMError(f"{file} is not valid JSON: {error}") from error


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
            raise InvalidRequestError(f"{place} is a system message; only the first message may be one", place)
    if found:
        read_messages(found)
    return found
