"""SamplingParams refuses what cannot be meant, by the name of the field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from cllm.engine.params import SamplingParams
from cllm.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("n", 0),
        ("n", 129),
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 100.5),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("frequency_penalty", 2.5),
        ("frequency_penalty", math.nan),
        ("presence_penalty", -2.5),
        ("logit_bias", {7: 101.0}),
        ("logit_bias", {7: math.nan}),
        ("logprobs", -1),
        ("logprobs", 21),
        ("stop", ("fine", "")),
        ("min_tokens", -1),
        ("seed", "x"),
        ("stop", ["fine", 3]),
        ("stop", 3),
        ("stop_token_ids", ["x"]),
        ("stop_token_ids", 3),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {1.5: 1}),
        ("logit_bias", {7: "a"}),
        ("logit_bias", [7]),
        ("structured", "json"),
        ("context_window", 5),
        ("ignore_eos", "no"),
    ],
)
def test_a_bad_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


def test_the_message_holds_the_value() -> None:
    with pytest.raises(InvalidRequestError, match=r"temperature is -1"):
        SamplingParams(temperature=-1)


def test_min_tokens_may_not_pass_max_tokens() -> None:
    with pytest.raises(InvalidRequestError, match="5") as caught:
        SamplingParams(max_tokens=4, min_tokens=5)
    assert caught.value.param == "min_tokens"
    assert SamplingParams(max_tokens=5, min_tokens=5).min_tokens == 5


def test_one_stop_string_may_come_alone() -> None:
    assert SamplingParams(stop="END").stop == ("END",)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", None),
        ("temperature", 0.0),
        ("top_p", 1e-9),
        ("top_k", -1),
        ("logprobs", 0),
        ("logit_bias", {0: -100.0, 1: 100.0}),
        ("seed", -(2**70)),
    ],
)
def test_the_edges_are_allowed(field: str, value: Any) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value


def test_only_temperature_zero_is_greedy() -> None:
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=1e-6).greedy


@pytest.mark.parametrize(
    ("field", "value"), [("max_tokens", 1.5), ("n", True), ("temperature", "hot"), ("top_k", None)]
)
def test_wrong_types_are_named(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError) as error:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert error.value.param == field
