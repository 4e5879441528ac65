"""The input of a stored response as items again, in pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from cllm.errors import InvalidRequestError
from cllm.server.http.response import as_json, list_pieces
from cllm.server.responses.tools import CalledTool, input_of
from cllm.server.schema.validation import shorten

_MOST = 100
_DEFAULT = 20
_PARAMETERS = frozenset({"after", "include", "include[]", "limit", "order"})
"""`include`, which clients also call `include[]`, is a hint: it asks for parts of items that are not stored here."""

StoredItem = dict[str, Any]


class Page(NamedTuple):
    limit: int
    newest_first: bool
    after: str | None
    """Begin behind the item with this id."""

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Page:
        for name in query:
            if name not in _PARAMETERS:
                raise InvalidRequestError(f"{shorten(repr(name))} is not a parameter of this request", name[:64])
        limit, order = query.get("limit", str(_DEFAULT)), query.get("order", "desc")
        if not (limit.isascii() and limit.isdigit() and 1 <= len(limit) <= 3 and 1 <= int(limit) <= _MOST):
            raise InvalidRequestError(f"limit is {shorten(repr(limit))}; it must be from 1 to {_MOST}", "limit")
        if order not in ("asc", "desc"):
            raise InvalidRequestError(f"order is {shorten(repr(order))}; it must be 'asc' or 'desc'", "order")
        return cls(int(limit), order == "desc", query.get("after"))

    def pieces(self, items: Sequence[StoredItem]) -> Iterator[str]:
        """An `InputItemsReply`."""
        items = items[::-1] if self.newest_first else items
        start = 0
        if self.after is not None:
            found = [number for number, item in enumerate(items, 1) if item["id"] == self.after]
            if not found:
                raise InvalidRequestError(
                    f"after is {shorten(repr(self.after))}, which is no input item of this response", "after"
                )
            start = found[0]
        shown = items[start : start + self.limit]
        end = {
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": start + len(shown) < len(items),
        }
        return _pieces(shown, end)


def _pieces(items: Sequence[StoredItem], end: dict[str, Any]) -> Iterator[str]:
    yield '{"object":"list","data":'
    yield from list_pieces(map(as_json, items), entries=1)
    yield f",{as_json(end)[1:]}"


def items_of(messages: Sequence[dict[str, Any]], response_id: str) -> list[StoredItem]:
    """Messages as `ConversationBuilder` makes them, as the items that they were made from."""
    customs: set[str] = set()
    return [
        {"id": f"{prefix}_{response_id}_input_{number}", **item, "status": "completed"}
        for number, (prefix, item) in enumerate(pair for message in messages for pair in _items(message, customs))
    ]


def _items(message: dict[str, Any], customs: set[str]) -> Iterator[tuple[str, StoredItem]]:
    """Each with the beginning of its id. `customs`: the ids of calls of custom tools, so far."""
    role, text, calls = message["role"], message["content"], message.get("tool_calls", ())
    if role == "tool":
        call_id = message["tool_call_id"]
        prefix, kind = ("ctco", "custom_tool_call") if call_id in customs else ("fco", "function_call")
        yield prefix, {"type": f"{kind}_output", "call_id": call_id, "output": text}
        return
    if "reasoning_content" in message:
        thought = {"type": "reasoning_text", "text": message["reasoning_content"]}
        yield "rs", {"type": "reasoning", "summary": [], "content": [thought]}
    if text or not (calls or "reasoning_content" in message):
        said = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        part = said if role == "assistant" else {"type": "input_text", "text": text}
        yield "msg", {"type": "message", "role": role, "content": [part]}
    for call in calls:
        given = call["function"]["arguments"]
        item = call.get("item") or CalledTool(call["function"]["name"]).item(call["id"])
        arguments = given if isinstance(given, str) else as_json(given)
        if item["type"] == "custom_tool_call":
            customs.add(call["id"])
            yield "ctc", {**item, "input": input_of(arguments)}
        else:
            yield "fc", {**item, "arguments": arguments}
