"""`cllm chat` while it runs: questions, commands, and what the person at the terminal is told."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from cllm.cli import tuning
from cllm.cli.conversation import Conversation, FullContextError
from cllm.cli.local import Answer
from cllm.cli.memory import explain_bus_errors
from cllm.cli.options import say
from cllm.cli.reading import QUOTES, SYSTEM, Reader, open_reader, without_quotes
from cllm.cli.wrapping import WordWrapper
from cllm.config import Config
from cllm.dialect.answer import ToolCall
from cllm.engine.params import ContextWindow
from cllm.errors import CLLMError, InvalidRequestError
from cllm.llm import AsyncLLM
from cllm.models.registry import cache_dir

SHORT_HELP = "/help lists the commands, Ctrl-D or /bye ends, Ctrl-C stops an answer"
HELP = f"""\
/set                 show the sampling parameters
/set NAME VALUE      change one; VALUE {tuning.RESET} is the model's own, context_window {tuning.OFF} is none
/system TEXT         set the system message; without TEXT there is none
/tools FILE          let the model call these tools (OpenAI's JSON); alone it lists them, {tuning.OFF} removes them
/retry               another answer to the last question
/save FILE           write the messages and settings as JSON
/load FILE           go on with such a file
/reset               forget what was said
/help                this
/bye                 end, as Ctrl-D; Ctrl-C stops an answer
{QUOTES} begins and ends a question of several lines; Alt-Enter is a line break; what is pasted stays in one piece.
A line that begins with a path, or with a blank, is a question."""

Ask = Callable[[Callable[[str], object]], Answer | None]
"""Hands an answer to what it is given; None if it was stopped."""
_COMMAND = re.compile(r"/[A-Za-z]*$")


class Talk:
    def __init__(self, conversation: Conversation, reader: Reader, out: TextIO) -> None:
        self._conversation = conversation
        self._reader = reader
        self._out = out
        self._commands: dict[str, Callable[[str], None]] = {
            "/set": self._set,
            SYSTEM: self._system,
            "/tools": self._tools,
            "/retry": self._retry,
            "/save": self._save,
            "/load": self._load,
            "/reset": self._reset,
            "/help": lambda _: say(HELP),
        }

    def run(self) -> None:
        """Until the end of stdin or /bye."""
        while self._turn():
            pass

    def _turn(self) -> bool:
        """False: it was the last."""
        try:
            text = self._reader.read()
            if text is None or text.strip() in ("/bye", "/quit", "/exit"):
                return False
            self._take(text)
        except KeyboardInterrupt:
            say(SHORT_HELP)
        return True

    def _take(self, text: str) -> None:
        name = text.split(maxsplit=1)[0] if text.startswith("/") else ""
        try:
            if name in self._commands:
                self._commands[name](text.removeprefix(name).strip())
            elif _COMMAND.match(name) and not Path(name).exists():
                say(f"there is no command {name}; {SHORT_HELP}")
            elif question := without_quotes(text).strip():
                self._exchange(lambda write: self._conversation.ask(question, write))
        except CLLMError as error:
            say(f"cllm: {error}")

    # -- answers -----------------------------------------------------------------------------------------------

    def _exchange(self, ask: Ask) -> None:
        answer = self._show_or_roll(ask)
        while answer is not None and answer.finish_reason == "tool_calls":
            results = self._results(answer.calls)
            if results is None:
                say("without a result the model cannot go on; the next question takes the place of this one")
                return
            answer = self._show_or_roll(partial(self._conversation.tell, results))

    def _results(self, calls: Sequence[ToolCall]) -> list[str] | None:
        """What the person says the tools gave."""
        results = []
        for call in calls:
            say(f"{call.name} {call.arguments}")
            result = self._reader.read_result(f"result of {call.name}: ")
            if result is None:
                return None
            results.append(without_quotes(result).strip())
        return results

    def _show_or_roll(self, ask: Ask) -> Answer | None:
        """None: there is no answer that could go on."""
        try:
            return self._show(ask)
        except FullContextError as error:
            say(f"cllm: {error}")
            return self._show(ask) if self._rolls() else None

    def _show(self, ask: Ask) -> Answer | None:
        printer = _printer(self._out)
        try:
            answer = ask(printer.write)
        finally:
            printer.end()
        say(answer.statistics() if answer else "[stopped]")
        if answer and answer.finish_reason != "tool_calls" and answer.calls:
            say(f"the call of {answer.calls[-1].name} is not whole: {answer.calls[-1].arguments}")
        if answer and answer.finish_reason == "length" and self._is_full(answer):
            say(f"the answer ends here: the context of {self._conversation.max_context} tokens is full; {_ADVICE}")
        return answer

    def _is_full(self, answer: Answer) -> bool:
        return answer.prompt_tokens + answer.completion_tokens >= self._conversation.max_context

    def _rolls(self) -> bool:
        """Whether to go on with a rolling window."""
        if "context_window" in self._conversation.settings:
            return False
        wish = self._reader.read_line("Go on with a rolling window, which forgets the oldest messages? [Y/n] ")
        if wish is None or wish.strip().lower() not in ("", "y", "yes"):
            say(_ADVICE)
            return False
        self._conversation.roll()
        return True

    # -- commands ----------------------------------------------------------------------------------------------

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        if not name:
            for each, effective in self._conversation.effective().items():
                say(_setting(each, effective, self._conversation.settings))
        elif not value.strip():
            raise InvalidRequestError(f"what is {name} to be? /set NAME VALUE; /set alone shows what there is", name)
        else:
            self._conversation.set(name, value.strip())
            say(_setting(name, self._conversation.effective()[name], self._conversation.settings))

    def _system(self, text: str) -> None:
        self._conversation.system = without_quotes(text).strip() or None
        say("the system message is set" if self._conversation.system else "there is no system message now")

    def _tools(self, name: str) -> None:
        if name == tuning.OFF:
            self._conversation.tools = []
        elif name:
            self._conversation.load_tools(_path(name, "/tools"))
        for tool in self._conversation.tools:
            say(f"{tool.name}: {tool.description}" if tool.description else tool.name)
        if not self._conversation.tools:
            say("there are no tools; /tools FILE takes them from a file in OpenAI's JSON")

    def _retry(self, _: str) -> None:
        self._exchange(self._conversation.retry)

    def _save(self, name: str) -> None:
        self._conversation.save(_path(name, "/save"))
        say(f"saved as {name}")

    def _load(self, name: str) -> None:
        self._conversation.load(_path(name, "/load"))
        say(f"{len(self._conversation.messages)} messages from {name}")

    def _reset(self, _: str) -> None:
        self._conversation.reset()
        say("forgotten")


_ADVICE = (
    "/set context_window TOKENS goes on with a rolling window of the most recent ones, /reset begins anew, "
    "/save FILE keeps what was said"
)


def run_chat(config: Config, settings: Mapping[str, Any], system: str | None, out: TextIO) -> dict[str, Any]:
    """Talk until the user has enough; the history and what was measured. Answers go to `out`."""
    tuning.checked(settings)
    llm = AsyncLLM(config, before_mapping=explain_bus_errors)
    with closing(asyncio.new_event_loop()) as loop:
        loop.run_until_complete(llm.start())
        try:
            conversation = Conversation(loop, llm, settings, system)
            reader = open_reader(out, cache_dir() / "chat_history")
            if sys.stdin.isatty():
                say(f"{conversation.title}. {SHORT_HELP}.")
            Talk(conversation, reader, out).run()
            return conversation.as_json()
        finally:
            loop.run_until_complete(llm.shutdown(0))


class _Plain:
    """An answer on its way into a file or a pipe."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._began = False

    def write(self, piece: str) -> None:
        self._began = True
        print(piece, end="", file=self._out, flush=True)

    def end(self) -> None:
        if self._began:
            print(file=self._out, flush=True)


def _printer(out: TextIO) -> _Plain | WordWrapper:
    return WordWrapper(out) if out.isatty() else _Plain(out)


def _setting(name: str, effective: Any, given: Mapping[str, Any]) -> str:
    if isinstance(effective, ContextWindow):
        effective = f"{effective.recent} recent tokens, and the first {effective.keep}"
    elif effective is None or effective == ():
        effective = {"seed": "random", "max_tokens": "as many as fit"}.get(name, tuning.OFF)
    return f"{name} = {effective}" + ("" if name in given else f" ({tuning.RESET})")


def _path(name: str, command: str) -> Path:
    if not name:
        raise InvalidRequestError(f"which file? {command} FILE", "file")
    return Path(name).expanduser()
