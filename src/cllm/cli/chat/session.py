"""The loop of `cllm chat`: read a line, then run a command or ask the model."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from cllm.cli.chat import sampling
from cllm.cli.chat.conversation import Conversation, FullContextError
from cllm.cli.chat.input import QUOTES, SYSTEM, QuestionReader, open_reader, without_quotes
from cllm.cli.chat.output import open_writer
from cllm.cli.local import statistics
from cllm.cli.options import print_status
from cllm.cli.out_of_memory import explain_bus_errors
from cllm.config import Config
from cllm.engine.params import ContextWindow
from cllm.errors import CLLMError, InvalidRequestError
from cllm.generation import Completion, ToolCall
from cllm.llm import AsyncLLM
from cllm.models.registry import cache_dir

SHORT_HELP = "/help lists the commands, Ctrl-C stops an answer, Ctrl-D or /bye quits"
HELP = f"""\
/set                 show the sampling parameters
/set NAME VALUE      change one; {sampling.RESET} restores the model's, context_window {sampling.OFF} ends the window
/system TEXT         set the system message; without TEXT, remove it
/tools FILE          load tools the model may call (OpenAI's JSON); without FILE, list them; {sampling.OFF} removes them
/retry               answer the last question again
/save FILE           save the messages and settings as JSON
/load FILE           continue a saved conversation
/reset               start a new conversation
/help                show this list
/bye                 quit (or Ctrl-D); Ctrl-C stops an answer
Start and end a question of several lines with {QUOTES}, or break lines with Alt-Enter. Pasted text stays one question.
A line that starts with a path or a space is a question, not a command."""

Ask = Callable[[Callable[[str], object]], Completion | None]
"""Streams an answer to a callback and returns it; None if it was stopped."""
_COMMAND = re.compile(r"/[A-Za-z]*$")


class ChatSession:
    def __init__(self, conversation: Conversation, reader: QuestionReader, out: TextIO) -> None:
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
            "/help": lambda _: print_status(HELP),
        }

    def run(self) -> None:
        """Run until the end of stdin or /bye."""
        while self._turn():
            pass

    def _turn(self) -> bool:
        """False after the last turn."""
        try:
            text = self._reader.read()
            if text is None or text.strip() in ("/bye", "/quit", "/exit"):
                return False
            self._handle(text)
        except KeyboardInterrupt:
            print_status(SHORT_HELP)
        return True

    def _handle(self, text: str) -> None:
        name = text.split(maxsplit=1)[0] if text.startswith("/") else ""
        try:
            if name in self._commands:
                self._commands[name](text.removeprefix(name).strip())
            elif _COMMAND.match(name) and not Path(name).exists():
                print_status(f"unknown command {name}; {SHORT_HELP}")
            elif question := without_quotes(text).strip():
                self._ask(lambda write: self._conversation.ask(question, write))
        except CLLMError as error:
            print_status(f"cllm: {error}")

    # -- answers -----------------------------------------------------------------------------------------------

    def _ask(self, ask: Ask) -> None:
        answer = self._show_or_offer_window(ask)
        while answer is not None and answer.finish_reason == "tool_calls":
            results = self._results(answer.tool_calls)
            if results is None:
                print_status("the model needs the result to continue; your next question replaces this one")
                return
            answer = self._show_or_offer_window(partial(self._conversation.add_results, results))

    def _results(self, calls: Sequence[ToolCall]) -> list[str] | None:
        """Ask the user for the results of the calls."""
        results = []
        for call in calls:
            print_status(f"{call.name} {call.arguments}")
            result = self._reader.read_result(f"result of {call.name}: ")
            if result is None:
                return None
            results.append(without_quotes(result).strip())
        return results

    def _show_or_offer_window(self, ask: Ask) -> Completion | None:
        """Show an answer; if the context is full, offer a rolling window. None: no answer that could go on."""
        try:
            return self._show(ask)
        except FullContextError as error:
            print_status(f"cllm: {error}")
            return self._show(ask) if self._accepts_window() else None

    def _show(self, ask: Ask) -> Completion | None:
        writer = open_writer(self._out)
        try:
            answer = ask(writer.write)
        finally:
            writer.end()
        print_status(statistics(answer) if answer else "[stopped]")
        if answer and answer.finish_reason != "tool_calls" and answer.tool_calls:
            call = answer.tool_calls[-1]
            print_status(f"the call of {call.name} is incomplete: {call.arguments}")
        if answer and answer.finish_reason == "length":
            print_status(f"the answer ends here: {self._why_cut(answer)}")
        return answer

    def _why_cut(self, answer: Completion) -> str:
        if self._is_full(answer):
            return f"the context of {self._conversation.max_context} tokens is full; {_ADVICE}"
        most = self._conversation.params.max_tokens
        return f"max_tokens is {most}; /set max_tokens NUMBER allows longer answers (or start with --max-tokens NUMBER)"

    def _is_full(self, answer: Completion) -> bool:
        if self._conversation.window is not None:
            return False
        return answer.prompt_tokens + answer.completion_tokens >= self._conversation.max_context

    def _accepts_window(self) -> bool:
        """Offer to continue with a rolling window; whether the user accepts."""
        if "context_window" in self._conversation.settings:
            print_status(_ADVICE)
            return False
        reply = self._reader.read_line("Continue with a rolling window, which forgets the oldest messages? [Y/n] ")
        if reply is None or reply.strip().lower() not in ("", "y", "yes"):
            print_status(_ADVICE)
            return False
        self._conversation.use_rolling_window()
        return True

    # -- commands ----------------------------------------------------------------------------------------------

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        if not name:
            for each, effective in self._conversation.effective().items():
                print_status(_setting(each, effective, self._conversation.settings))
        elif not value.strip():
            raise InvalidRequestError(
                f"no value for {name}: type /set NAME VALUE, or /set to list the parameters", name
            )
        else:
            self._conversation.set(name, value.strip())
            print_status(_setting(name, self._conversation.effective()[name], self._conversation.settings))

    def _system(self, text: str) -> None:
        self._conversation.system = without_quotes(text).strip() or None
        print_status("system message set" if self._conversation.system else "system message removed")

    def _tools(self, name: str) -> None:
        if name == sampling.OFF:
            self._conversation.tools = []
        elif name:
            self._conversation.load_tools(_path(name, "/tools"))
        for tool in self._conversation.tools:
            print_status(f"{tool.name}: {tool.description}" if tool.description else tool.name)
        if not self._conversation.tools:
            print_status("no tools; /tools FILE loads them from a file in OpenAI's JSON format")

    def _retry(self, _: str) -> None:
        self._ask(self._conversation.retry)

    def _save(self, name: str) -> None:
        self._conversation.save(_path(name, "/save"))
        print_status(f"saved to {name}")

    def _load(self, name: str) -> None:
        self._conversation.load(_path(name, "/load"))
        print_status(f"loaded {len(self._conversation.messages)} messages from {name}")

    def _reset(self, _: str) -> None:
        self._conversation.reset()
        print_status("new conversation")


_ADVICE = (
    "/set context_window TOKENS continues with a rolling window of the most recent tokens, /reset starts over, "
    "/save FILE saves the conversation"
)


def run_chat(config: Config, settings: Mapping[str, Any], system: str | None, out: TextIO) -> dict[str, Any]:
    """Chat until the user quits; return the messages and statistics. Answers go to `out`."""
    sampling.validate(settings)
    llm = AsyncLLM(config, before_mapping=explain_bus_errors)
    with closing(asyncio.new_event_loop()) as loop:
        if sys.stdin.isatty():
            print_status(f"loading {'fake' if config.backend.type == 'fake' else config.model.name} ...")
        loop.run_until_complete(llm.start())
        try:
            conversation = Conversation(loop, llm, settings, system)
            reader = open_reader(out, cache_dir() / "chat_history")
            if sys.stdin.isatty():
                print_status(f"{conversation.title}. {SHORT_HELP}.")
            ChatSession(conversation, reader, out).run()
            return conversation.as_json()
        finally:
            loop.run_until_complete(llm.shutdown(0))


def _setting(name: str, effective: Any, given: Mapping[str, Any]) -> str:
    if isinstance(effective, ContextWindow):
        effective = f"{effective.recent} recent tokens, and the first {effective.keep}"
    elif effective is None or effective == ():
        effective = {"seed": "random", "max_tokens": "as many as fit"}.get(name, sampling.OFF)
    return f"{name} = {effective}" + ("" if name in given else f" ({sampling.RESET})")


def _path(name: str, command: str) -> Path:
    if not name:
        raise InvalidRequestError(f"no file given: type {command} FILE", "file")
    return Path(name).expanduser()
