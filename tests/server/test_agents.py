"""What coding agents send first is accepted as it is, and their second turn finds the first one in the cache."""

from __future__ import annotations

import json

import pytest

from agent_shapes import AGENTS, Agent, read_answer, second_turn
from http_kit import client_for
from scripted_llm import ScriptedLLM

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n<tools>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>\n"
    "Call one in <tool_call></tool_call>.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or () %}{% if message.content or not loop.first %}\n{% endif %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT = 65_536


def asks_with_usage(agent: Agent) -> Agent:
    """Not all ask for the usage that tells what was cached."""
    extra = {"stream_options": {"include_usage": True}} if "completions" in agent.path else {}
    return Agent(agent.name, agent.path, {**agent.body, **extra}, agent.left_out)


@pytest.mark.parametrize("calls", [False, True])
@pytest.mark.parametrize("agent", [*map(asks_with_usage, AGENTS)], ids=lambda agent: agent.name)
async def test_the_second_turn_is_cached(agent: Agent, calls: bool) -> None:
    called = {"name": _called(agent), "arguments": {"command": "ls"}}
    says = f"<tool_call>\n{json.dumps(called)}\n</tool_call>" if calls and "tools" in agent.body else "I have read it."
    llm = ScriptedLLM(text=says, max_context=CONTEXT, template=TEMPLATE)
    async with client_for(llm) as client:
        first = await client.post(agent.path, json={**agent.body, **_room(agent)})
        assert first.status_code == 200, first.text
        assert first.headers.get("x-tools-left-out", "") == ", ".join(agent.left_out)
        answer = read_answer(agent, first.text)
        assert bool(answer.results) == (says != "I have read it."), first.text
        second = await client.post(agent.path, json={**second_turn(agent, answer), **_room(agent)})
        assert second.status_code == 200, second.text
        found = read_answer(agent, second.text)
        for pinned in llm.executor.kv()["details"]["pins"]["prefixes"]:
            await llm.executor.unpin(pinned["id"])
    assert answer.cached_tokens == 0 and found.prompt_tokens > answer.prompt_tokens > 500
    assert found.cached_tokens >= 0.95 * found.prompt_tokens


def _called(agent: Agent) -> str:
    if agent.path == "/v1/responses":
        return "helpers_v1__begin"
    return "Shell" if agent.path.startswith("/v1/messages") else "shell"


def _room(agent: Agent) -> dict[str, int]:
    """A token is a byte here."""
    return {"max_output_tokens" if agent.path == "/v1/responses" else "max_tokens": 200}
