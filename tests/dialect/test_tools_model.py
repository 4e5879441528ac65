"""Tool calls of the real default model: small as it is, a call that is demanded parses."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from cllm.config import Config
from cllm.llm import AsyncLLM
from cllm.server.app import create_app

pytestmark = pytest.mark.model

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}},
]
BODY = {
    "messages": [{"role": "user", "content": "What is the weather in Paris, in celsius?"}],
    "tools": TOOLS,
    "temperature": 0,
    "max_tokens": 200,
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize("tool_format", ["auto", "hermes", "llama3", "mistral"])
async def test_a_demanded_call_parses(tool_format: str) -> None:
    config = Config.model_validate({"kv": {"disk": {"enabled": False}}, "chat": {"tool_format": tool_format}})
    async with AsyncLLM(config) as llm:
        transport = httpx.ASGITransport(app=create_app(llm, config))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=120) as client:

            async def ask(**more: Any) -> dict[str, Any]:
                response = await client.post("/v1/chat/completions", json={**BODY, **more})
                assert response.status_code == 200, response.text
                choice: dict[str, Any] = response.json()["choices"][0]
                return choice

            named = await ask(tool_choice=NAMED)
            assert named["finish_reason"] == "tool_calls", named
            (call,) = named["message"]["tool_calls"]
            assert call["function"]["name"] == "get_weather"
            arguments = json.loads(call["function"]["arguments"])
            assert isinstance(arguments["city"], str)
            assert arguments["unit"] in ("celsius", "fahrenheit")
            required = await ask(tool_choice="required", parallel_tool_calls=False)
            assert required["finish_reason"] == "tool_calls", required
            assert len(required["message"]["tool_calls"]) == 1
            results = [
                {"role": "assistant", "content": None, "tool_calls": named["message"]["tool_calls"]},
                {"role": "tool", "tool_call_id": call["id"], "content": "22 degrees"},
            ]
            answer = await ask(messages=[*BODY["messages"], *results], tool_choice="none")  # type: ignore[misc]
            assert answer["message"]["content"]
            begun = [*BODY["messages"], {"role": "assistant", "content": "It is 22"}]  # type: ignore[misc]
            assert (await ask(messages=begun, continue_final_message=True, tools=[]))["message"]["content"]
