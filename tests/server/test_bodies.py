"""Counting what a body's JSON holds before it is parsed: exact, whatever its strings contain."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cllm.config import ServerConfig
from cllm.errors import InvalidRequestError
from cllm.server.openai.schema import ChatRequest, CompletionRequest
from cllm.server.schema import body as bodies
from cllm.server.schema.body import INLINE_BYTES, MAX_DEPTH, MAX_PARAMETERS, read_body

LIMITS = ServerConfig(max_json_values=16_384, max_json_keys=16_384)
AWKWARD = '[{",:\\"}]\\' * 5_000


def refusal(raw: bytes, limits: ServerConfig = LIMITS) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as refused:
        read_body(CompletionRequest, raw, limits)
    return refused.value


def test_what_stands_in_strings_does_not_count() -> None:
    for text in (AWKWARD, "\\" * 30_001, '"' * 30_001, ",:" * 50_000, "[{" * 50_000):
        raw = json.dumps({"prompt": text, "user": 'a"b\\'}).encode()
        assert read_body(CompletionRequest, raw, LIMITS).prompt == text


@pytest.mark.parametrize("most", [16_384, 40_000])
@pytest.mark.parametrize(("before", "values"), [({}, 0), ({"user": AWKWARD[:200]}, 1), ({"stop": ["a", "b"]}, 3)])
@pytest.mark.parametrize("after", [{}, {"n": 1}])
def test_the_limit_of_values_is_exact_and_names_the_largest(
    most: int, before: dict[str, Any], values: int, after: dict[str, Any]
) -> None:
    limits = ServerConfig(max_json_values=most)
    others = 2 + values + len(after)  # the body and the list itself count, too
    fitting = {**before, "prompt": [1] * (most - others), **after}
    assert len(read_body(CompletionRequest, json.dumps(fitting).encode(), limits).prompt) == most - others
    fitting["prompt"] = [1] * (most - others + 1)
    refused = refusal(json.dumps(fitting).encode(), limits)
    assert (refused.param, "server.max_json_values" in str(refused)) == ("prompt", True)


def test_the_limit_of_keys_names_the_largest() -> None:
    raw = json.dumps({"prompt": "a", "logit_bias": {str(n): 1 for n in range(16_384)}, "n": 1}).encode()
    refused = refusal(raw, ServerConfig(max_json_keys=16_384, max_logit_bias=100_000))
    assert (refused.param, "server.max_json_keys" in str(refused)) == ("logit_bias", True)


def test_the_first_unknown_of_too_many_keys_is_named() -> None:
    raw = json.dumps({"prompt": "a" * INLINE_BYTES, "n": 1, **{f'k"{n}': n for n in range(MAX_PARAMETERS)}}).encode()
    assert refusal(raw).param == "k0"


def test_one_key_again_and_again_is_refused() -> None:
    raw = b'{"prompt":"' + b"a" * INLINE_BYTES + b'"' + b',"n":1' * MAX_PARAMETERS + b"}"
    assert f"more than {MAX_PARAMETERS} keys" in str(refusal(raw))


@pytest.mark.parametrize("filler", [0, INLINE_BYTES])
def test_depth_is_limited_in_small_and_large_bodies(filler: int) -> None:
    deep = json.loads("[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1))
    assert "nested" not in str(refusal(json.dumps({"user": "a" * filler, "prompt": deep}).encode()))
    assert f"nested more than {MAX_DEPTH} deep" in str(
        refusal(json.dumps({"user": "a" * filler, "prompt": [deep]}).encode())
    )


@pytest.mark.parametrize("raw", [b"", b"{", b'{"a":', b"[" * 100_000, b'{"a' * 30_000, b"\\" * 30_000, b'"' * 30_001])
def test_broken_json_is_refused_whatever_it_counts_as(raw: bytes) -> None:
    assert refusal(raw).param is None


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b'{"prompt": "\xff"}', "not valid UTF-8"),
        (b'{"n": ' + b"1" * 5000 + b"}", "too many digits"),
        (b"[1]", "JSON object"),
    ],
)
def test_what_is_wrong_with_a_body_is_said(raw: bytes, said: str) -> None:
    assert said in str(refusal(raw))


def test_a_byte_order_mark_is_no_mistake() -> None:
    assert read_body(CompletionRequest, b'\xef\xbb\xbf{"prompt": "a"}', LIMITS).prompt == "a"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('a"\\,:[]{}\u00e9')),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=5),
)


def count(value: Any) -> tuple[int, int, int]:
    """Values, keys and depth, the slow way. An empty list counts as one that holds something, as do the commas."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else None
    if inner is None:
        return 1, 0, 0
    counts = [count(each) for each in inner] or [(1, 0, 0)]
    keys = len(value) if isinstance(value, dict) else 0
    return (
        1 + sum(each[0] for each in counts),
        keys + sum(each[1] for each in counts),
        1 + max(each[2] for each in counts),
    )


@settings(deadline=None)
@given(value=json_values, slice_bytes=st.integers(1, 40), ascii_only=st.booleans())
def test_counting_in_slices_equals_counting_what_was_parsed(value: Any, slice_bytes: int, ascii_only: bool) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only).encode()
    counter = bodies._JsonCount(raw, LIMITS, frozenset())
    depths: list[int] = []
    counter._judge = depths.append  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "_SLICE", slice_bytes)
        counter.check()
    assert (counter._values, counter._keys, max(depths)) == count(value)


def test_a_part_that_is_no_text_is_named_by_its_type() -> None:
    part = {"type": "image_url", "image_url": {"url": "x"}}
    raw = json.dumps({"messages": [{"role": "user", "content": [part]}]}).encode()
    with pytest.raises(InvalidRequestError) as refused:
        read_body(ChatRequest, raw, LIMITS)
    assert refused.value.param == "messages[0].content[0].type"
