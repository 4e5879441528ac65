"""What `LLM` says of arguments that it cannot use, and its answers to several conversations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cllm import LLM, SamplingParams
from cllm.errors import InvalidRequestError

GREEDY = SamplingParams(temperature=0, max_tokens=4)
HELLO = [{"role": "user", "content": "hello"}]
GOODBYE = [{"role": "user", "content": "goodbye"}]
LONG = "x" * 5000
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(backend="fake") as opened:
        yield opened


@pytest.mark.parametrize("method", ["generate", "embed"])
@pytest.mark.parametrize(
    ("value", "said"),
    [
        (5, "NAME is 5; it must be a text, a list of token ids, or a list of these"),
        (None, "NAME is None; it must be a text, a list of token ids, or a list of these"),
        (b"hi", "NAME is b'hi'; it must be a text, a list of token ids, or a list of these"),
        ({"prompt": "hi"}, "NAME is {'prompt': 'hi'}; it must be a text, a list of token ids, or a list of these"),
        (["hi", 5], "NAME[1] is 5; it must be a text or a list of token ids"),
        (["hi", ["hi"]], "NAME[1] is ['hi']; it must be a text or a list of token ids"),
        ([True], "NAME[0] is True; it must be a text or a list of token ids"),
        (["hi", ""], "NAME[1]: the prompt is empty: it needs at least one token"),
        (["hi", [1, 99999]], "NAME[1]: the prompt contains token id 99999; ids go from 0 to 319"),
    ],
)
def test_prompts_that_are_none(llm: LLM, method: str, value: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        getattr(llm, method)(value)
    assert str(caught.value) == said.replace("NAME", "prompts" if method == "generate" else "texts")


def test_one_prompt_is_a_text_or_token_ids(llm: LLM) -> None:
    assert len(llm.generate("hi", GREEDY)) == len(llm.generate([1, 2, 3], GREEDY)) == 1
    assert len(llm.generate([np.int64(1), 2], GREEDY)) == 1
    assert len(llm.generate(["hi", [1, 2, 3], (4, 5)], GREEDY)) == 3
    assert llm.generate([], GREEDY) == []


def test_a_prompt_that_is_too_long_is_named_before_anything_is_computed(llm: LLM) -> None:
    computed = llm.kv()["query_tokens"]
    with pytest.raises(InvalidRequestError, match=r"^prompts\[2\]: .*context length is 4096 .* has 5000 tokens"):
        llm.generate(["a", "b", LONG, "c"], GREEDY)
    with pytest.raises(InvalidRequestError, match=r"^texts\[1\]: .*maximum context length is 4096 .* has 5000 tokens"):
        llm.embed(["a", LONG])
    with pytest.raises(InvalidRequestError, match=r"^messages\[1\]: .*maximum context length is 4096"):
        llm.chat([HELLO, [{"role": "user", "content": LONG}]], GREEDY)
    with pytest.raises(InvalidRequestError, match=r"^messages\[1\]: .*maximum context length is 4096"):
        llm.chat([HELLO, [{"role": "user", "content": LONG}]], GREEDY, tools=[TOOL])
    assert llm.kv()["query_tokens"] == computed
    with pytest.raises(InvalidRequestError, match=r"^This model's maximum context"):
        llm.generate([LONG], GREEDY)


@pytest.mark.parametrize(
    ("params", "example"),
    [({"max_tokens": 2}, "SamplingParams(**params)"), (5, "SamplingParams(max_tokens=64)")],
)
def test_parameters_that_are_none(llm: LLM, params: Any, example: str) -> None:
    said = f"params is {params!r}; it must be SamplingParams or None, for example {example}"
    calls = (
        lambda: llm.generate("hi", params),
        lambda: llm.chat(HELLO, params),
        lambda: llm.chat(HELLO, params, tools=[TOOL]),
        lambda: list(llm.stream("hi", params)),
    )
    for call in calls:
        with pytest.raises(InvalidRequestError) as caught:
            call()
        assert (str(caught.value), caught.value.param) == (said, "params")


@pytest.mark.parametrize("tools", [(), (TOOL,)])
def test_chat_answers_several_conversations(llm: LLM, tools: Any) -> None:
    alone = [llm.chat(messages, GREEDY, tools=tools) for messages in (HELLO, GOODBYE)]
    together = llm.chat([HELLO, GOODBYE], GREEDY, tools=tools)
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    assert alone[0].token_ids != alone[1].token_ids


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ("hi", r"messages is 'hi'; it must be a list of messages, such as \[\{"),
        (HELLO[0], r"messages is \{.*\}; it must be a list of messages, such as \[\{"),
        ([*HELLO, HELLO], r"messages\[1\] is \[.*\]; it must be a message as the first"),
        ([HELLO, *HELLO], r"messages\[1\] is \{.*\}; it must be a list as the first"),
        ([HELLO, []], r"messages\[1\]: messages is empty"),
        ([HELLO, [{"role": "robot", "content": ""}]], r"messages\[1\]: messages\[0\]\.role is 'robot'"),
    ],
)
def test_messages_that_are_none(llm: LLM, messages: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{said}"):
        llm.chat(messages, GREEDY)


@pytest.mark.parametrize("prompt", [5, ["a", "b"]])
def test_stream_takes_one_prompt(llm: LLM, prompt: Any) -> None:
    with pytest.raises(InvalidRequestError, match="it must be one text or a list of token ids"):
        list(llm.stream(prompt, GREEDY))


@pytest.mark.parametrize("dimensions", [0, 9, "x", 1.5])
def test_dimensions_out_of_range(llm: LLM, dimensions: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"^dimensions is {dimensions!r}; it must be 1 to 8"):
        llm.embed("hi", dimensions=dimensions)
