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
        or None not in (body.get("stop"), body.get("stop_sequences"))
        or _speaks_of_tools(body)
        or _tokens_of_window(body) > 4096
        or sum(_marks_in(body.get(name)) for name in ("messages", "system", "tools")) > 4
        or len(str([body.get(name) for name in ("messages", "input", "system")])) > 100_000  # more than fits
        or (body.get("context_window") is not None and _scores_its_prompt(body))
        or _number(body, "dimensions", 1) > 8  # the fake model's
        or body.get("continue_final_message") is True
        or (body.get("separate_reasoning") is not None and body.get("reasoning_format") is not None)
        or bool(OURS & set(body.get("chat_template_kwargs") or ()))
        or (isinstance(body.get("prompt"), list) and len(body["prompt"]) * _number(body, "n", 1) > 128)
    )


OURS = {"messages", "tools", "bos_token", "eos_token", "add_generation_prompt", "continue_final_message"}


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
