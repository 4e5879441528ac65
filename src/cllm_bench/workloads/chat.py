"""Conversations that take turns: is the history still cached when the next turn comes?"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import partial

from cllm_bench.client import Client
from cllm_bench.figures import Figure, Metrics, times_the_peer
from cllm_bench.load import at_most
from cllm_bench.peers import Needs
from cllm_bench.prompts import Prompts
from cllm_bench.response import TimedResponse
from cllm_bench.workloads.over_http import HttpWorkload

_TEMPLATE_TOKENS = 10
"""What a chat template puts around a message, about."""


@dataclass(frozen=True)
class Chat(HttpWorkload):
    """All chats do their first turn, then all do their second, and so on, a few at a time.

    A turn's prompt is the whole history, with the answers this server gave.
    """

    chats: int = 12
    turns: int = 4
    at_a_time: int = 4
    message_tokens: int = 60
    answer_tokens: int = 48

    name = "chat"
    figures = (
        Figure("seconds", "total", "s", limit=times_the_peer(4.0)),
        Figure("cached_percent", "prompt from cache", "%", "higher"),
    )

    @property
    def title(self) -> str:
        return (
            f"chat: {self.chats} chats x {self.turns} turns, {self.at_a_time} at a time, "
            f"{self.message_tokens} tokens a message, {self.answer_tokens} out"
        )

    @property
    def needs(self) -> Needs:
        turn = self.message_tokens + self.answer_tokens + 2 * _TEMPLATE_TOKENS
        return Needs(self.name, at_once=self.at_a_time, tokens=self.turns * turn)

    def quick(self) -> Chat:
        return replace(self, chats=4, turns=2, at_a_time=2, message_tokens=30, answer_tokens=8)

    async def drive(self, client: Client, prompts: Prompts) -> Metrics:
        messages = [[prompts.text(self.message_tokens) for _ in range(self.turns)] for _ in range(self.chats)]
        histories: list[list[dict[str, str]]] = [[] for _ in range(self.chats)]
        one_turn_at_a_time = [asyncio.Lock() for _ in range(self.chats)]

        async def next_turn(chat: int) -> TimedResponse:
            async with one_turn_at_a_time[chat]:
                history = histories[chat]
                history.append({"role": "user", "content": messages[chat][len(history) // 2]})
                answer = await client.chat(history, self.answer_tokens)
                history.append({"role": "assistant", "content": answer.text})
                return answer

        turns = [partial(next_turn, chat) for _ in range(self.turns) for chat in range(self.chats)]
        await at_most(self.at_a_time, turns)
        return {}
