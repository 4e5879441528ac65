"""Structured answers from outside: every name for them, streams, refusals that name the field."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from cllm import LLM, AsyncLLM, SamplingParams
from cllm.config import load_config
from cllm.errors import InvalidRequestError, StructureError
from cllm.server.app import create_app
from cllm.structured.structure import Structure

FAKE = {"backend.type": "fake", "log.level": "error"}
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["small", "large"]}, "number": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["kind", "number"],
    "additionalProperties": False,
}
BY_SCHEMA = r'\{"kind": "(small|large)", "number": [0-9]\}'
TAGS = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "What?", "max_tokens": 80},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "What?"}], "max_completion_tokens": 80},
    "/generate": {"prompt": "What?", "max_tokens": 80},
}
NAMES: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}},
     BY_SCHEMA),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, BY_SCHEMA),
    ({"guided_json": SCHEMA}, BY_SCHEMA),
    ({"guided_json": json.dumps(SCHEMA)}, BY_SCHEMA),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, BY_SCHEMA),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": False,
                                                                 "schema": {"not": {"type": "null"}, **SCHEMA}}}},
     BY_SCHEMA),
    ({"json_schema": SCHEMA}, BY_SCHEMA),
    ({"json_schema": json.dumps(SCHEMA)}, BY_SCHEMA),
    ({"regex": "[cd]{2}"}, "[cd]{2}"),
    ({"ebnf": 'root ::= "e" | "f"'}, "e|f"),
    ({"structured_outputs": {"regex": "g", "disable_any_whitespace": False, "disable_fallback": True}}, "g"),
    ({"structured_outputs": {"json": SCHEMA}}, BY_SCHEMA),
    ({"guided_regex": r"[ab]{3}-\d"}, "[ab]{3}-[0-9]"),
    ({"structured_outputs": {"regex": "x+y{2}z?"}, "logit_bias": {"121": 100}}, "x+y{2}z?"),
    ({"guided_choice": ["yes", "no \"quoted\""]}, 'yes|no "quoted"'),
    ({"structured_outputs": {"choice": ["é", "ü"]}}, "é|ü"),
    ({"guided_grammar": 'root ::= "a" [0-9] | "b"'}, "a[0-9]|b"),
    ({"grammar": 'root ::= "(" num ")"\nnum ::= [0-9]{2}'}, r"\([0-9]{2}\)"),
    ({"structured_outputs": {"grammar": 'start: "x" /[0-9]/'}}, "x[0-9]"),
]  # fmt: skip


@asynccontextmanager
async def client(**settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    config = load_config(None, {**FAKE, **{key.replace("__", "."): value for key, value in settings.items()}}).config
    async with AsyncLLM(config) as llm:
        transport = httpx.ASGITransport(app=create_app(llm, llm.config), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as opened:
            yield opened


def answer_of(reply: dict[str, Any]) -> tuple[str, str]:
    if "choices" not in reply:
        return reply["data"]["text"], reply["data"]["finish_reason"]
    choice = reply["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"], choice["finish_reason"]


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_every_name_for_a_structure(path: str) -> None:
    async with client() as http:
        for fields, pattern in NAMES:
            reply = await http.post(path, json={**ENDPOINTS[path], **fields})
            assert reply.status_code == 200, (fields, reply.text)
            text, reason = answer_of(reply.json())
            assert reason == "stop" and re.fullmatch(pattern, text), (fields, text)


async def test_any_object_and_tags() -> None:
    async with client() as http:
        body = {**ENDPOINTS["/v1/chat/completions"], "response_format": {"type": "json_object"}}
        reply = await http.post("/v1/chat/completions", json=body)
        assert answer_of(reply.json())[0].startswith("{")
        body["response_format"] = {"type": "structural_tag", **TAGS}
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
        body["response_format"] = {"type": "text"}
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 200


async def test_a_stream_is_what_comes_at_once() -> None:
    body = {**ENDPOINTS["/v1/chat/completions"], "json_schema": SCHEMA, "seed": 5, "n": 2}
    async with client() as http:
        whole = (await http.post("/v1/chat/completions", json=body)).json()
        lines = (await http.post("/v1/chat/completions", json={**body, "stream": True})).text.splitlines()
    texts = ["", ""]
    for line in lines:
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]
    assert all(re.fullmatch(BY_SCHEMA, text) for text in texts)


async def test_usage_counts_forced_tokens_and_a_stop_string_ends_before_them() -> None:
    async with client() as http:
        body = {"prompt": "What?", "max_tokens": 80, "guided_choice": ["one two three"]}
        reply = (await http.post("/v1/completions", json=body)).json()
        assert answer_of(reply) == ("one two three", "stop")
        assert reply["usage"]["completion_tokens"] == len("one two three") + 1
        cut = (await http.post("/v1/completions", json={**body, "stop": " three"})).json()
        assert answer_of(cut) == ("one two", "stop")
        short = (await http.post("/v1/completions", json={**body, "max_tokens": 5})).json()
        assert answer_of(short) == ("one t", "length") and short["usage"]["completion_tokens"] == 5


ENDLESS = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"], "additionalProperties": False}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_regex": "a", "grammar": 'root ::= "a"'}, "grammar", "together with guided_regex"),
    ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema"),
    ({"response_format": {"type": "json_schema", "schema": {}, "json_schema": {"schema": {"type": "null"}}}},
     "response_format.json_schema", "not allowed together with response_format.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}},
     "response_format.json_schema.strict", "true or false"),
    ({"response_format": {"type": "json_schema", "schema": {}, "strict": 1}},
     "response_format.strict", "true or false"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"lark": "x"}}, "structured_outputs.lark", "not a parameter"),
    ({"structured_outputs": {"regex": "x", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern",
     "not supported"),
    ({"regex": "x", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "not supported"),
    ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 4}}, "json_schema", "minimum (5)"),
    ({"json_schema": {"allOf": [{"type": "string"}, {"type": "null"}]}}, "json_schema", "Unsatisfiable"),
    ({"json_schema": {"$ref": "#"}}, "json_schema", "no answer"),
    ({"json_schema": {"properties": {"a": {"items": {"uniqueItems": True}}}}}, "json_schema", "at /properties/a/items"),
    ({"json_schema": {"$ref": "https://example.org/x"}}, "json_schema", "example.org"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "sting"}}}},
     "response_format.json_schema.schema", "sting"),
    ({"guided_json": "{"}, "guided_json", "is not JSON"),
    ({"guided_json": "[]"}, "guided_json", "must be an object"),
    ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
    ({"guided_regex": "a(?=b)"}, "guided_regex", "look-ahead"),
    ({"guided_choice": []}, "guided_choice", "empty"),
    ({"guided_choice": [""]}, "guided_choice", "empty"),
    ({"grammar": 'root ::= "a'}, "grammar", "line 1"),
    ({"grammar": "start: nobody"}, "grammar", "nobody"),
    ({"grammar": "start: " + "(" * 300 + '"a"' + ")" * 300}, "grammar", "brackets"),
    ({"grammar": "start: r0\n" + "".join(f"r{n}: r{n + 1}\n" for n in range(5000)) + 'r5000: "a"'}, "grammar", "rules"),
    ({"guided_json": {"$defs": {f"a{n}": {"$ref": f"#/$defs/a{n + 1}"} for n in range(3000)}, "$ref": "#/$defs/a0"}},
     "guided_json", "references"),
    ({"json_schema": {"properties": {f"p{n}": {} for n in range(3000)}}}, "json_schema", "too big"),
    ({"json_schema": ENDLESS}, "json_schema", "never ends"),
    ({"guided_choice": ["x" * 50_000]}, "guided_choice", "fixed text"),
    ({"guided_choice": ["x" * 300_000]}, "guided_choice", "structured.max_source_kb"),
    ({"response_format": {"type": "structural_tag", "structures": [{"begin": "x", "end": ""}], "triggers": ["y"]}},
     "response_format", "triggers"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(REFUSED)))
async def test_what_cannot_be_is_refused_by_name(number: int) -> None:
    fields, param, words = REFUSED[number]
    async with client() as http:
        reply = await http.post("/v1/completions", json={"prompt": "What?", **fields})
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        assert error["param"] == param and words in error["message"], error
        next_one = await http.post("/v1/completions", json={"prompt": "What?", "guided_choice": ["a"]})
        assert answer_of(next_one.json()) == ("a", "stop")


async def test_what_becomes_too_complex_is_the_request_s_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from cllm.structured.matcher import Matcher

    def accept(self: Matcher, token: int) -> None:
        raise StructureError("the answer's structure became too complex: x")

    async with client() as http:
        body = {"prompt": "What?", "guided_regex": "[a-z]{5}"}
        await http.post("/v1/completions", json=body)
        monkeypatch.setattr(Matcher, "accept", accept)
        reply = await http.post("/v1/completions", json=body)
    assert reply.status_code == 400 and "too complex" in reply.text


async def test_a_schema_may_not_take_for_ever() -> None:
    """In a real worker process, which is killed."""
    async with client(structured__compile_timeout_s=0.01) as http:
        schema = {"type": "integer", "multipleOf": 98791}
        body = {"prompt": "What?", "guided_json": schema}
        reply = await http.post("/v1/completions", json=body)
        assert reply.status_code == 400 and "structured.compile_timeout_s" in reply.text
        reply = await http.post("/v1/completions", json={"prompt": "What?", "guided_choice": ["a"]})
        assert reply.status_code == 200


def test_the_python_face() -> None:
    params = SamplingParams(structured=Structure("choice", '["left", "right"]'), max_tokens=20)
    with LLM("fake", backend="fake", settings={"structured.max_cached_mb": 1}) as llm:
        answers = llm.generate(["one", "two"], params, progress=False)
        assert all(answer.text in ("left", "right") and answer.finish_reason == "stop" for answer in answers)
        assert "".join(llm.stream("three", params)) in ("left", "right")
        with pytest.raises(InvalidRequestError, match="unclosed"):
            llm.generate("x", SamplingParams(structured=Structure("regex", "(")))


async def test_the_tool_whose_schema_is_wrong_is_named() -> None:
    wrong = {"type": "object", "properties": {"a": {"type": "sting"}}}
    tools = [
        {"type": "function", "function": {"name": f"f{number}", "parameters": parameters, "strict": True}}
        for number, parameters in enumerate([SCHEMA, wrong])
    ]
    async with client() as http:
        reply = await http.post("/v1/chat/completions", json={**ENDPOINTS["/v1/chat/completions"], "tools": tools})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, "tools[1]"), error
        assert "sting (at /properties/a)" in error["message"] and "start:" not in error["message"]


@pytest.mark.parametrize(("source", "words"), [("{", "is not JSON"), ("[" * 100_000, "nested too deeply")])
async def test_beside_tools_a_structure_is_refused_by_its_own_name(source: str, words: str) -> None:
    body = {**ENDPOINTS["/v1/chat/completions"], "tools": [{"type": "function", "function": {"name": "f"}}]}
    async with client() as http:
        reply = await http.post("/v1/chat/completions", json={**body, "guided_json": source})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, "guided_json") and words in error["message"], error
