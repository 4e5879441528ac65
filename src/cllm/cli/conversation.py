"""A conversation with a model, at the terminal or over a pipe."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import closing, suppress
from typing import Any

from cllm.cli.local import Answer, stream_answer
from cllm.cli.memory import explain_bus_errors
from cllm.cli.options import say
from cllm.config import Config
from cllm.engine.params import SamplingParams
from cllm.errors import CLLMError, InvalidRequestError
from cllm.llm import AsyncLLM

HELP = "/reset forgets the conversation, /quit or Ctrl-D ends, Ctrl-C stops an answer"


def run_chat(config: Config, params: SamplingParams, system: str | None) -> dict[str, Any]:
    """Talk until the user has enough; the history and what was measured."""
    llm = AsyncLLM(config, before_mapping=explain_bus_errors)
    with closing(asyncio.new_event_loop()) as loop:
        loop.run_until_complete(llm.start())
        try:
            conversation = Conversation(loop, llm, params, system)
            talk(conversation)
            return conversation.as_json()
        finally:
            loop.run_until_complete(llm.shutdown(0))


class Conversation:
    """The history, and how it grows. The event loop runs only while an answer is being made."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, llm: AsyncLLM, params: SamplingParams, system: str | None
    ) -> None:
        self.title = f"{llm.model_name} on {llm.backend_name}"
        self._loop = loop
        self._llm = llm
        self._params = params
        self._start = [{"role": "system", "content": system}] if system else []
        self._messages = self._start
        self._answers: list[Answer] = []

    def reset(self) -> None:
        self._messages = self._start

    def ask(self, text: str) -> Answer | None:
        """Stream the answer to stdout. None if Ctrl-C stopped it; what was said until then is remembered."""
        question = [*self._messages, {"role": "user", "content": text}]
        said: list[str] = []
        task = self._loop.create_task(self._answer(question, said))
        self._loop.add_signal_handler(signal.SIGINT, task.cancel)
        try:
            answer = self._loop.run_until_complete(task)
            self._answers.append(answer)
        except asyncio.CancelledError:
            answer = None
        finally:
            self._loop.remove_signal_handler(signal.SIGINT)
        self._messages = [*question, {"role": "assistant", "content": "".join(said)}]
        return answer

    async def _answer(self, messages: list[dict[str, str]], said: list[str]) -> Answer:
        def write(piece: str) -> None:
            said.append(piece)
            print(piece, end="", flush=True)

        return await stream_answer(self._llm, self._llm.encode_chat(messages, self._params), self._params, write)

    def as_json(self) -> dict[str, Any]:
        return {"messages": self._messages, "answers": [answer.as_json() for answer in self._answers]}


def talk(conversation: Conversation) -> None:
    """Read lines until the end of stdin or /quit."""
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if interactive:
        with suppress(ImportError):
            import readline  # noqa: F401 (gives input() editing and history)
        say(f"{conversation.title}. {HELP}.")
    while (line := _read_line("> " if interactive else "")) is not None:
        command = line.strip()
        if command == "/quit":
            return
        if command == "/reset":
            conversation.reset()
            say("forgotten")
        elif command == "/help":
            say(HELP)
        elif command.startswith("/"):
            say(f"there is no command {command}: {HELP}")
        elif command:
            _exchange(conversation, line)


def _exchange(conversation: Conversation, text: str) -> None:
    """A question that fails leaves the conversation as it was."""
    try:
        answer = conversation.ask(text)
    except CLLMError as error:
        say(f"cllm: {error}")
    else:
        print()
        say(answer.statistics() if answer else "[stopped]")


def _read_line(prompt: str) -> str | None:
    """None at the end of stdin."""
    try:
        return input(prompt)
    except KeyboardInterrupt:
        say(f"\n{HELP}")
        return ""
    except EOFError:
        if prompt:
            print()
        return None
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"stdin is not UTF-8 text: {error}", "messages") from error
