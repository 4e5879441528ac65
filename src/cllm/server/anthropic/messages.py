"""Turns Anthropic's messages into the messages that chat templates take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cllm.server.schema.messages import MOST_MARKS, CacheControl, Mark
from cllm.server.schema.tools import ToolCallIds
from cllm.server.schema.validation import refusal

if TYPE_CHECKING:
    from cllm.server.anthropic.schema import Block, Message, MessagesInput, TextBlock, ToolResultBlock, ToolUseBlock


class Conversation:
    """Consecutive messages of one role become one, as in Anthropic's API; tool results become messages of their own."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.marks: list[Mark] = []
        self._calls = ToolCallIds()
        self._said: list[str] = []
        self._thought: list[str] = []
        """Parts of the last message, joined once at its end: there may be a great many."""

    @classmethod
    def of(cls, body: MessagesInput) -> Conversation:
        made = cls()
        made._add_system(body.system)
        for tool in body.tools or ():  # templates write tools into the system message, or next to it
            made._mark(tool.cache_control)
        for number, message in enumerate(body.messages):
            made._add(message, f"messages[{number}]")
        made._join()
        if made.continues and not made._calls.all_answered:
            raise refusal("messages", "end with a tool_use; send its tool_result")
        return made

    @property
    def continues(self) -> bool:
        """Whether the last message is the assistant's, which the answer continues."""
        return bool(self.messages) and self.messages[-1]["role"] == "assistant"

    def _add_system(self, system: str | Sequence[TextBlock] | None) -> None:
        if isinstance(system, str):
            self._say("system", system)
        for block in system if isinstance(system, list) else ():
            self._say("system", block.text)
            self._mark(block.cache_control)

    def _add(self, message: Message, where: str) -> None:
        if isinstance(message.content, str):
            self._say(message.role, message.content)
            return
        if not message.content:
            self._say(message.role, "")
        for number, block in enumerate(message.content):
            self._add_block(message.role, block, f"{where}.content[{number}]")
            self._mark(getattr(block, "cache_control", None))

    def _add_block(self, role: str, block: Block, where: str) -> None:
        needs = {"tool_use": "assistant", "thinking": "assistant", "redacted_thinking": "assistant"}.get(block.type)
        needs = "user" if block.type == "tool_result" else needs
        if needs is not None and role != needs:
            raise refusal(
                f"{where}.type", f"is {block.type!r}, which is only allowed in messages of the role {needs!r}"
            )
        if block.type == "text":
            self._say(role, block.text)
        elif block.type == "thinking":
            self._think(block.thinking)
        elif block.type == "tool_use":
            self._call(block, where)
        elif block.type == "tool_result":
            self._answer(block, where)

    def _say(self, role: str, text: str) -> None:
        self._last(role)
        self._said.append(text)

    def _think(self, text: str) -> None:
        self._last("assistant")
        self._thought.append(text)

    def _call(self, block: ToolUseBlock, where: str) -> None:
        self._calls.add_call(block.id, block.name, f"{where}.id")
        function = {"name": block.name, "arguments": block.input}
        calls = self._last("assistant").setdefault("tool_calls", [])
        calls.append({"id": block.id, "type": "function", "function": function})

    def _answer(self, block: ToolResultBlock, where: str) -> None:
        name = self._calls.add_result(block.tool_use_id, f"{where}.tool_use_id")
        content = block.content or ""
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        if block.is_error:
            text = f"Error: {text}"
        self._begin({"role": "tool", "tool_call_id": block.tool_use_id, "name": name, "content": text})
        for part in content if isinstance(content, list) else ():
            self._mark(part.cache_control)

    def _last(self, role: str) -> dict[str, Any]:
        """The last message, if it is of this role, or a new one."""
        if not self.messages or self.messages[-1]["role"] != role:
            self._begin({"role": role, "content": ""})
        return self.messages[-1]

    def _begin(self, message: dict[str, Any]) -> None:
        self._join()
        self._said, self._thought = [], []
        self.messages.append(message)

    def _join(self) -> None:
        if self._said:
            self.messages[-1]["content"] = "\n".join(self._said)
        if self._thought:
            self.messages[-1]["reasoning_content"] = "\n".join(self._thought)

    def _mark(self, control: CacheControl | None) -> None:
        if control is None:
            return
        if len(self.marks) == MOST_MARKS:  # checked before one is added: each holds all messages before it
            raise refusal("messages", f"has more than {MOST_MARKS} cache_control marks, system and tools included")
        self._join()
        before = [*self.messages]
        if before:  # the last one may still grow
            last = before[-1] = {**before[-1]}
            if "tool_calls" in last:
                last["tool_calls"] = [*last["tool_calls"]]
        self.marks.append((before, control))
