"""How model families write tool calls, for reading them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cllm.dialect.calls import CallReader, CallState, Tools
from cllm.dialect.json_scan import JsonScanner, repaired
from cllm.dialect.reader import Attempt
from cllm.dialect.reasoning import held_back

_BARE = re.compile(r"\s*(?:```(?:json)?\s*)?(?:\[\s*)?(?=\{)")
_MAYBE_BARE = re.compile(r"\s*(?:`{0,2}|```(?:j|js|jso|json)?\s*)(?:(?<!`)\[\s*)?")
_MISTRAL_NAME = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\][\w-]+)?(?:\[ARGS\])?\s*")
_LONGEST_NAME = 256


class JsonSyntax:
    """Where tool calls begin in a text, and how they are read: here, JSON objects, one by one or in a list, behind
    markers or, where `bare`, at the answer's beginning."""

    def __init__(self, *markers: str, close: Sequence[str] = (), bare: bool = False) -> None:
        self.markers = markers
        self.bare = bare
        self._close = (*close, "]", ",", ";", "```")

    def begins(self, text: str, *, at_start: bool, after_call: bool) -> tuple[int, int, int]:
        """(first, last, held): the text from `first` to `last` begins a call; `held` characters at the end may become
        such a beginning. No call: `first` and `last` are -1."""
        if after_call or (at_start and self.bare):
            if found := _BARE.match(text):
                return len(text) - len(text.lstrip()), found.end(), 0
            if _MAYBE_BARE.fullmatch(text):
                return -1, -1, len(text)
        places = [(at, at + len(marker)) for marker in self.markers if (at := text.find(marker)) >= 0]
        if places:
            return *min(places), 0
        return -1, -1, max((held_back(text, marker) for marker in self.markers), default=0)

    def attempt(self, opening: str, tools: Tools) -> Attempt:
        return JsonAttempt(tools, bare=not any(marker in opening for marker in self.markers))

    def closing(self, text: str) -> tuple[int, bool]:
        """How many characters at the beginning of what follows a call belong to it, and whether more may."""
        rest, unused = text.lstrip(), list(self._close)
        while (mark := next((mark for mark in unused if rest.startswith(mark)), None)) is not None:
            unused.remove(mark)
            rest = rest[len(mark) :].lstrip()
        return len(text) - len(rest), any(mark.startswith(rest) for mark in unused) or not rest


class MistralSyntax(JsonSyntax):
    """`[TOOL_CALLS][{…}, {…}]`, or `[TOOL_CALLS]name[ARGS]{…}` for each call."""

    def __init__(self) -> None:
        super().__init__("[TOOL_CALLS]")

    def attempt(self, opening: str, tools: Tools) -> Attempt:
        return MistralAttempt(tools) if self.markers[0] in opening else super().attempt(opening, tools)


class JsonAttempt:
    """A call, perhaps within two pairs of brackets, as the template of Qwen 2.5 shows it."""

    def __init__(self, tools: Tools, *, bare: bool) -> None:
        self.took_last = True
        self._reader = CallReader(tools, needs_arguments=bare)
        self._leads = "" if bare else "["
        self._began = False
        self._at_second = False
        """Whether only the first bracket has come."""
        self._doubled = False

    @property
    def name(self) -> str | None:
        return self._reader.name

    @property
    def arguments(self) -> list[str]:
        return self._reader.arguments

    @property
    def complete(self) -> bool:
        return self._reader.complete

    def feed(self, char: str) -> CallState:
        if not self._began and char != "{":
            if char == self._leads:
                self._leads = ""
                return CallState.OPEN
            self.took_last = char.isspace()
            return CallState.OPEN if self.took_last else CallState.FAILED
        if self._doubled and self._reader.ended:
            return self._feed_behind(char)
        if self._at_second and char == "{":
            self._doubled, self._at_second = True, False
            return CallState.OPEN
        self._at_second = not self._began
        self._began = True
        state = self._reader.feed(char)
        self.took_last = self._reader.took_last
        return CallState.OPEN if state is CallState.DONE and self._doubled and self.took_last else state

    def _feed_behind(self, char: str) -> CallState:
        """Up to the outer bracket."""
        self.took_last = char.isspace() or char == "}"
        return CallState.OPEN if char.isspace() else CallState.DONE


class OrJsonAttempt:
    """A call in a format of its own, or in JSON."""

    def __init__(self, tools: Tools) -> None:
        self.name: str | None = None
        self.arguments: list[str] = []
        self.took_last = True
        self.complete = False
        self._tools = tools
        self._json: JsonAttempt | None = None

    def _feed_json(self, attempt: JsonAttempt, char: str) -> CallState:
        state = attempt.feed(char)
        self.name, self.took_last, self.complete = attempt.name, attempt.took_last, attempt.complete
        self.arguments += attempt.arguments
        attempt.arguments.clear()
        return state


class MistralAttempt(OrJsonAttempt):
    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._head = ""
        self._scanner: JsonScanner | None = None

    def feed(self, char: str) -> CallState:
        if self._scanner is not None:
            return self._feed_arguments(self._scanner, char)
        if self._json is None and not self._head.strip() and char in "[{":
            self._json = JsonAttempt(self._tools, bare=False)
        if self._json is not None:
            return self._feed_json(self._json, char)
        return self._feed_name(char)

    def _feed_name(self, char: str) -> CallState:
        if char == "{":
            found = _MISTRAL_NAME.fullmatch(self._head)
            if found is None or found[1] not in self._tools:
                self.took_last = False
                return CallState.FAILED
            self.name, self._scanner = found[1], JsonScanner()
            return self._feed_arguments(self._scanner, char)
        self._head += char
        fits = char.isalnum() or char in "_.-[]" or char.isspace()
        if fits and len(self._head) <= _LONGEST_NAME:
            return CallState.OPEN
        self.took_last = False
        return CallState.FAILED

    def _feed_arguments(self, scanner: JsonScanner, char: str) -> CallState:
        was_string = scanner.in_string
        if not scanner.feed(char):
            self.took_last = False
            return CallState.BROKEN
        self.arguments.append(repaired(char) if was_string else char)
        self.complete = scanner.done
        return CallState.DONE if scanner.done else CallState.OPEN
