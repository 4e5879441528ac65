"""Read by schemathesis in test_api_schema.py: which bodies not to send, though the API's description allows them."""

from __future__ import annotations

from typing import Any

import schemathesis

STRUCTURES = frozenset(
    {
        *("response_format", "structured_outputs", "json_schema", "grammar"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    }
)


@schemathesis.hook
def filter_case(_context: schemathesis.HookContext, case: schemathesis.Case) -> bool:
    return not (isinstance(case.body, dict) and (breaks_a_relation(case.body) or takes_long(case.body)))


@schemathesis.hook
def map_body(_context: schemathesis.HookContext, body: Any) -> Any:
    """Without structures: JSON Schema cannot say which schemas, expressions and grammars are right, nor that there is
    one at most."""
    if isinstance(body, dict):
        return {name: value for name, value in body.items() if name not in STRUCTURES}
    return body


def breaks_a_relation(body: dict[str, Any]) -> bool:
    """Two parameters that do not go together, in a way that JSON Schema has no words for."""
    most = (body.get("max_tokens"), body.get("max_completion_tokens"))
    return (
        body.get("best_of") not in (None, body.get("n"))
        or _number(body, "min_tokens", 0) > _number(body, "max_tokens", 16)
        or (None not in most and most[0] != most[1])
        or _tokens_of_window(body) > 4096
        or _marks_in(body.get("messages")) > 4
        or not _messages_fit(body.get("messages"))
        or not _tools_fit(body)
        or body.get("continue_final_message") is True
        or (body.get("separate_reasoning") is not None and body.get("reasoning_format") is not None)
        or bool(OURS & set(body.get("chat_template_kwargs") or ()))
        or len(str(body.get("messages"))) > 100_000  # the context is 4,096 characters
        or (isinstance(body.get("prompt"), list) and len(body["prompt"]) * _number(body, "n", 1) > 128)
    )


OURS = {"messages", "tools", "bos_token", "eos_token", "add_generation_prompt", "continue_final_message"}


def _messages_fit(messages: Any) -> bool:
    """Each has what its role needs and nothing else, and no id comes twice."""
    if not isinstance(messages, list):
        return True
    for message in messages:
        role = message.get("role")
        calls = message.get("tool_calls") or []
        if message.get("content") is None and not (role == "assistant" and calls):
            return False
        if role != "assistant" and (calls or message.get("reasoning_content") or message.get("reasoning")):
            return False
        if (role == "tool") != (message.get("tool_call_id") is not None):
            return False
        if len({call["id"] for call in calls}) < len(calls):
            return False
    results = [message["tool_call_id"] for message in messages if message.get("role") == "tool"]
    return len(set(results)) == len(results)


def _tools_fit(body: dict[str, Any]) -> bool:
    """Names differ, schemas are those of objects, and none has to be one that a grammar can be made of."""
    tools = [tool["function"] for tool in body.get("tools") or ()]
    choice = body.get("tool_choice")
    return (
        choice in (None, "auto", "none")
        and len({tool["name"] for tool in tools}) == len(tools)
        and all((tool.get("parameters") or {}).get("type", "object") == "object" for tool in tools)
        and not any(tool.get("strict") for tool in tools)
    )


def takes_long(body: dict[str, Any]) -> bool:
    """Right, but ten thousands of tokens: of /benchmark, or of answers that do not end with the context."""
    if (
        _tokens_of_window(body)
        and max(_number(body, "max_tokens", 0), _number(body, "max_completion_tokens", 0)) > 1000
    ):
        return True
    return "requests" in body and _number(body, "requests", 1) * _number(body, "max_tokens", 32) > 1000


def _tokens_of_window(body: dict[str, Any]) -> float:
    """About what a rolling window takes; it must not be more than the context."""
    window = body.get("context_window")
    return _number(window, "keep", 4) + _number(window, "recent", 0) + 300 if isinstance(window, dict) else 0


def _marks_in(part: Any) -> int:
    """How many marks of cache_control are in messages, and in parts of these."""
    if isinstance(part, dict):
        return (part.get("cache_control") is not None) + _marks_in(part.get("content"))
    return sum(map(_marks_in, part)) if isinstance(part, list) else 0


def _number(body: dict[str, Any], name: str, default: float) -> float:
    value = body.get(name)
    return value if isinstance(value, (int, float)) else default
