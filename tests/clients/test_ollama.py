"""ollama for Python."""

from __future__ import annotations

import math
from typing import Any

import ollama
import pytest

from clients_kit import LIMIT_S, MESSAGES, MODEL, QUESTION, TOO_LONG, City, ServedModel
from http_kit import served as served_here
from scripted_chat import SPOKEN, TEMPLATE
from scripted_llm import ScriptedLLM
from server_process import until

CLIENT = "ollama"
pytestmark = pytest.mark.model
GREEDY: Any = {"temperature": 0, "num_predict": 16}


def weather(city: str) -> str:
    """The weather now.

    Args:
        city: Where.
    """
    return "18 degrees"


@pytest.fixture(scope="module")
def client(served: ServedModel) -> ollama.Client:
    return ollama.Client(host=served.url, headers=served.headers, timeout=LIMIT_S)


def test_chat(client: ollama.Client) -> None:
    """chat"""
    answer = client.chat(MODEL, MESSAGES, options=GREEDY)
    assert "Paris" in (answer.message.content or "") and answer.done_reason == "stop"
    assert (answer.prompt_eval_count or 0) > 10 and (answer.eval_count or 0) > 0


def test_stream(client: ollama.Client) -> None:
    """chat, streamed, with statistics at the end"""
    *pieces, last = client.chat(MODEL, MESSAGES, options=GREEDY, stream=True)
    assert "Paris" in "".join(piece.message.content or "" for piece in pieces)
    assert last.done and (last.eval_count or 0) > 0


def test_generate(client: ollama.Client) -> None:
    """generate: whole, streamed and raw"""
    whole = client.generate(MODEL, QUESTION, options=GREEDY).response
    assert whole == "".join(
        piece.response or "" for piece in client.generate(MODEL, QUESTION, options=GREEDY, stream=True)
    )
    assert client.generate(MODEL, "The capital of France is", raw=True, options=GREEDY).response


def test_format(client: ollama.Client) -> None:
    """structured output: a schema as format"""
    answer = client.chat(MODEL, MESSAGES, format=City.model_json_schema(), options={"num_predict": 60})
    City.model_validate_json(answer.message.content or "")


async def test_tools() -> None:
    """tools: functions, the model's calls and their results (with a model that answers as told)"""
    llm = ScriptedLLM(max_context=4096, template=TEMPLATE, text=SPOKEN)
    async with served_here(llm) as app:
        client = ollama.AsyncClient(host=app.url, timeout=LIMIT_S)
        asked: list[Any] = [{"role": "user", "content": "How warm is it?"}]
        answer = await client.chat("tiny", asked, tools=[weather])
        (call,) = answer.message.tool_calls or ()
        assert (call.function.name, call.function.arguments) == ("weather", {"city": "Paris"})
        stream = await client.chat("tiny", asked, tools=[weather], stream=True)
        assert [call] == [each async for piece in stream for each in piece.message.tool_calls or ()]
        result = {"role": "tool", "tool_name": call.function.name, "content": weather(**call.function.arguments)}
        await client.chat("tiny", [*asked, answer.message, result], tools=[weather])
    messages, options = llm.asked[-1]
    assert messages[1]["tool_calls"][0]["id"] == messages[2]["tool_call_id"] and messages[2]["content"] == "18 degrees"
    assert [tool["function"]["name"] for tool in options.tools] == ["weather"]


async def test_thinking() -> None:
    """think: reasoning in a field of its own (with a model that answers as told)"""
    async with served_here(ScriptedLLM(max_context=4096, template=TEMPLATE, text=SPOKEN)) as app:
        client = ollama.AsyncClient(host=app.url, timeout=LIMIT_S)
        answer = await client.chat("tiny", MESSAGES, think=True)
        assert (answer.message.thinking or "").strip() == "Hm." and "think" not in (answer.message.content or "")
        assert (await client.generate("tiny", QUESTION, think="high")).thinking
        assert "thinking" in ((await client.show("tiny")).capabilities or ())


def test_embed(client: ollama.Client) -> None:
    """embed and embeddings"""
    cat, dog = client.embed(MODEL, ["a cat", "a dog"]).embeddings
    assert math.isclose(math.hypot(*cat), 1, rel_tol=1e-5) and len(cat) == len(dog) > 100
    assert client.embeddings(MODEL, "a cat").embedding == pytest.approx(cat, abs=1e-4)
    assert len(client.embed(MODEL, "a cat", dimensions=32).embeddings[0]) == 32


def test_models(client: ollama.Client) -> None:
    """list, ps and show, with capabilities"""
    assert [model.model for model in client.list().models] == [MODEL]
    assert [model.model for model in client.ps().models] == [MODEL]
    shown = client.show(MODEL)
    assert shown.capabilities == ["completion", "tools", "embedding"]
    assert shown.modelinfo and shown.modelinfo["general.architecture"] == "llama"


def test_logprobs(client: ollama.Client) -> None:
    """log probabilities"""
    answer = client.chat(MODEL, MESSAGES, logprobs=True, top_logprobs=2, options=GREEDY)
    assert answer.logprobs and len(answer.logprobs) >= 2
    for token in answer.logprobs:
        assert len(token.top_logprobs or ()) == 2 and token.logprob <= 0


def test_errors(client: ollama.Client) -> None:
    """errors: ResponseError with the status, 400 and 404"""
    with pytest.raises(ollama.ResponseError, match="maximum context length") as long:
        client.chat(MODEL, TOO_LONG)
    assert long.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="does not reason"):
        client.chat(MODEL, MESSAGES, think=True)
    with pytest.raises(ollama.ResponseError) as unknown:
        client.chat("no-such-model", MESSAGES)
    assert unknown.value.status_code == 404


def test_cancel(served: ServedModel, client: ollama.Client) -> None:
    """a stream that is left ends at once"""
    stream: Any = client.generate(MODEL, "Count from one to a thousand.", options={"num_predict": 1500}, stream=True)
    next(stream)
    stream.close()
    until(served.idle)


async def test_async(served: ServedModel) -> None:
    """async"""
    client = ollama.AsyncClient(host=served.url, headers=served.headers, timeout=LIMIT_S)
    stream = await client.chat(MODEL, MESSAGES, options=GREEDY, stream=True)
    assert "Paris" in "".join([piece.message.content or "" async for piece in stream])
