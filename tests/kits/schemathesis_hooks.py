"""Read by schemathesis in test_api_schema.py: which bodies not to send, though the API's description allows them."""

from __future__ import annotations

from typing import Any

import schemathesis

STRUCTURES = frozenset(
    {
        *("response_format", "structured_outputs", "json_schema", "grammar", "format"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    }
)


@schemathesis.hook
def filter_case(_context: schemathesis.HookContext, case: schemathesis.Case) -> bool:
    if not isinstance(case.body, dict):
        return True
    return not (takes_long(case.body) or (_should_be_taken(case) and breaks_a_relation(case.body)))


@schemathesis.hook
def map_case(_context: schemathesis.HookContext, case: schemathesis.Case) -> schemathesis.Case:
    """What is right and fuzzed is without structures, and messages have content: few would be left by the filter."""
    if isinstance(case.body, dict) and _should_be_taken(case):
        for message in _messages(case.body):
            if message.get("content", "") is None:
                message["content"] = ""
        case.body = {name: value for name, value in case.body.items() if name not in STRUCTURES}
    return case


def _should_be_taken(case: schemathesis.Case) -> bool:
    return case.meta is None or case.meta.generation.mode.is_positive


def breaks_a_relation(body: dict[str, Any]) -> bool:
    """Two parameters that do not go together, in a way that JSON Schema has no words for."""
    most = (body.get("max_tokens"), body.get("max_completion_tokens"))
    return (
        _has_a_structure(body)
        or any(map(_breaks_its_role, _messages(body)))
        or _says_nothing(body)
        or body.get("best_of") not in (None, body.get("n"))
        or _number(body, "min_tokens", 0) > _number(body, "max_tokens", 16)
        or (None not in most and most[0] != most[1])
        or None not in (body.get("stop"), body.get("stop_sequences"))
        or _speaks_of_tools(body)
        or _tokens_of_window(body) > 4096
        or sum(_marks_in(body.get(name)) for name in ("messages", "system", "tools")) > 4
        or len(str([body.get(name) for name in ("messages", "input", "system")])) > 100_000  # more than fits
        or (body.get("context_window") is not None and _scores_its_prompt(body))
        or _number(body, "dimensions", 1) > 8  # the fake model's
        or body.get("continue_final_message") is True
        or not 0 < abs(_number(body, "truncate_prompt_tokens", 1)) < 4096  # more than fits
        or (bool(body.get("suffix")) and body.get("truncate_prompt_tokens") is not None)
        or (body.get("separate_reasoning") is not None and body.get("reasoning_format") is not None)
        or bool(OURS & set(body.get("chat_template_kwargs") or ()))
        or (isinstance(body.get("prompt"), list) and len(body["prompt"]) * _number(body, "n", 1) > 128)
    )


OURS = {"messages", "tools", "bos_token", "eos_token", "add_generation_prompt", "continue_final_message"}


def _has_a_structure(body: dict[str, Any]) -> bool:
    """Which schemas, expressions and grammars are right, and that there is one at most."""
    given = {name: body[name] for name in STRUCTURES if body.get(name) is not None}
    return bool(given) and given != {"response_format": {"type": "json_object"}}


def _messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    found = [*(body.get("messages") or ())]
    return [each for each in found if isinstance(each, dict)]


def _breaks_its_role(message: dict[str, Any]) -> bool:
    """Only the assistant thinks and calls, and only who calls may say nothing."""
    role, content = message.get("role"), message.get("content")
    only_assistant = [message.get(name) for name in ("tool_calls", "reasoning_content", "reasoning")]
    thinks = isinstance(content, list) and "thinking" in str([part.get("type") for part in content])
    return (
        content is None
        or (role != "assistant" and (any(only_assistant) or thinks))
        or (role == "tool") != (message.get("tool_call_id") is not None)
    )


def _says_nothing(body: dict[str, Any]) -> bool:
    """Items that make no message, such as reasoning without text."""
    given = body.get("input")
    items = given if isinstance(given, list) else []
    return bool(items) and all(isinstance(item, dict) and item.get("type") == "reasoning" for item in items)


def _speaks_of_tools(body: dict[str, Any]) -> bool:
    """Names, ids and schemas that must fit each other."""
    told = [body.get(name) for name in ("messages", "input", "tools", "tool_choice", "text", "output_config")]
    words = ("tool_use", "tool_result", "function", "'tool'", "'any'", "required", "schema")
    return any(word in str([*told, body.get("output_format")]) for word in words)


def _scores_its_prompt(body: dict[str, Any]) -> bool:
    return body.get("prompt_logprobs") is not None or bool(body.get("echo") and body.get("logprobs") is not None)


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
