"""One long chat, turn by turn: how much of it is computed again when it goes on, is edited, or the server restarts?"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cllm.models.gguf import GGUFModel
from cllm.models.registry import cache_dir
from cllm.text.chat_template import ChatTemplate
from cllm.text.template_source import CHATML, TemplateSource, load_chat_template
from cllm.text.tokenizer import load_tokenizer
from cllm_bench.client import Client
from cllm_bench.errors import BenchError
from cllm_bench.figures import OURS, Figure, Metrics, Run, own
from cllm_bench.peers import LLAMA_SERVER, Needs, start_llama_server
from cllm_bench.prompts import Prompts
from cllm_bench.response import TimedResponse
from cllm_bench.servers import start_cllm
from cllm_bench.workloads.base import Keep, Setup, Workload, busy_at_rest
from cllm_bench.workloads.over_http import warm_up

WHOLE_WINDOWS = f"{LLAMA_SERVER} --swa-full"
"""The side that keeps all K and V of layers with a window, so that it can go back further; for models that have any."""
STOP_S = 60.0
"""What is cached may be much, and all of it is written before a server ends."""
_TEMPLATE_TOKENS = 10
"""What a chat template puts around a message, about."""

Messages = Sequence[dict[str, str]]
Count = Callable[[Messages, bool], int]
"""Tokens of a chat, with the beginning of an answer or without."""


@dataclass(frozen=True, slots=True)
class Turn:
    key: str
    label: str
    most: float | None
    """How many tokens may be computed for each new one."""


FIRST = Turn("first", "the whole chat, never seen", None)
NEXT = Turn("next", "next turn", 1.1)
STRIPPED = Turn("stripped", "next turn, half of the last answer stripped", 1.1)
EDITED = Turn("edited", "third-last message edited", 1.1)
BACK = Turn("back", "after the edit, the chat as it was goes on", 1.1)
RESTARTED = Turn("restarted", "next turn, after a restart", None)
SECOND = Turn("second", "second user of a system prompt", None)
USERS = Turn("users", "all users from the third on", 1.1)
CHAT = (NEXT, STRIPPED, EDITED, BACK, RESTARTED)
TURNS = (FIRST, *CHAT, SECOND, USERS)
MOST_OF_COMPUTING = 0.125
"""The share of a whole computation's time in which a chat goes on after a restart."""


def _figures(turn: Turn) -> list[Figure]:
    limit = None if turn.most is None else own(turn.most)
    figures = [
        Figure(f"{turn.key}_computed", f"{turn.label}: tokens computed", "", format=",.0f"),
        Figure(f"{turn.key}_over_new", f"{turn.label}: computed / new", "x", limit=limit),
        Figure(f"{turn.key}_ttft_s", f"{turn.label}: first token", "s"),
    ]
    return figures[::2] if turn == FIRST else figures


@dataclass(frozen=True)
class Turns(Workload):
    """A chat of many messages is computed once. Then its next turn comes; the next one, which has only the second half
    of the last answer, as if its reasoning had been stripped; the same with the third-last message edited; the one that
    goes on without that edit; and after a restart the next turn. At last users come one after another, each with a text
    of their own behind one system prompt.

    New are the tokens behind the last message that stayed the same. Our answers are compared with those of a server
    that has seen nothing, each of which computes its whole prompt.
    """

    chat_tokens: int = 8000
    message_tokens: int = 250
    answer_tokens: int = 64
    users: int = 20
    system_tokens: int = 2000
    checks: int = len(CHAT) + 1
    """Answers that are compared: first those of the chat, then one user's."""

    name = "turns"
    over_http = True
    figures = (
        *(figure for turn in TURNS for figure in _figures(turn)),
        Figure("restarted_share", "first token after a restart / computing all", "", limit=own(MOST_OF_COMPUTING)),
        Figure("unequal", "answers that differ from those without a cache", "", limit=own(0.0), compared=False),
        Figure("checked", "answers compared", "", "higher", compared=False),
    )

    @property
    def title(self) -> str:
        return (
            f"turns: a chat of {self.chat_tokens:,} tokens, messages of {self.message_tokens}, {self.answer_tokens} "
            f"out; {self.users} users of a system prompt of {self.system_tokens:,}"
        )

    def quick(self) -> Turns:
        return replace(self, chat_tokens=400, message_tokens=60, answer_tokens=8, users=4, system_tokens=120)

    @property
    def needs(self) -> Needs:
        turn = self.message_tokens + self.answer_tokens + 2 * _TEMPLATE_TOKENS
        messages = self.chat_tokens * (1 + _TEMPLATE_TOKENS / self.message_tokens) + (len(CHAT) + 1) * turn
        return Needs(self.name, at_once=1, tokens=max(round(messages), self.system_tokens + 2 * turn))

    async def measure(self, setup: Setup, keep: Keep) -> None:
        others = [peer for peer in setup.against if peer != LLAMA_SERVER]
        if setup.url is not None or others:
            raise BenchError(
                f"turns restarts the servers that it measures: omit --url, and give --against {LLAMA_SERVER} or none"
            )
        count = chat_counter(setup)
        for repeat in range(setup.repeats):
            for side in sides(setup, repeat):
                setup.view.say(f"{self.title}: {setup.shown(side)}, {repeat + 1} of {setup.repeats}")
                one = _Pass(self, setup, side, repeat, count)
                try:
                    await one.run()
                    keep(one.result(None))
                except BenchError as error:
                    keep(one.result(str(error)))

    def history(self, prompts: Prompts) -> list[dict[str, str]]:
        """A chat that ends with what the user says."""
        count = max(1, self.chat_tokens // self.message_tokens) | 1
        roles = ("user", "assistant")
        return [_message(roles[number % 2], prompts.text(self.message_tokens)) for number in range(count)]


def sides(setup: Setup, repeat: int) -> list[str]:
    found = list(setup.sides(repeat))
    if LLAMA_SERVER in found and setup.backend != "fake" and _has_windows(setup):
        found.insert(found.index(LLAMA_SERVER) + 1, WHOLE_WINDOWS)
    return found


def _has_windows(setup: Setup) -> bool:
    return bool(GGUFModel.open(setup.model_file).keys.any("attention.sliding_window"))


def chat_counter(setup: Setup) -> Count:
    if setup.backend == "fake":
        template, encode = ChatTemplate.of(TemplateSource(CHATML)), str.encode
    else:
        model = GGUFModel.open(setup.model_file)
        template, tokenizer = ChatTemplate.of(load_chat_template(model)), load_tokenizer(model)

        def encode(text: str) -> Sequence[int]:  # type: ignore[misc]
            return tokenizer.encode(text, special=True)

    def count(messages: Messages, answered: bool) -> int:
        return len(encode(template.render(messages, add_generation_prompt=answered)))

    return count


@dataclass(slots=True)
class _Asked:
    """A prompt, and what came of it."""

    messages: list[dict[str, str]]
    new: int
    answer: TimedResponse

    @property
    def computed(self) -> int:
        return self.answer.prompt_tokens - self.answer.cached_tokens

    def described(self) -> dict[str, Any]:
        return {"prompt": self.answer.prompt_tokens, "new": self.new, "computed": self.computed}


@dataclass(slots=True)
class _Pass:
    """One side, once."""

    work: Turns
    setup: Setup
    side: str
    repeat: int
    count: Count
    asked: dict[str, list[_Asked]] = field(default_factory=dict)
    """By turn."""
    facts: dict[str, Any] = field(default_factory=dict)
    alone: dict[str, TimedResponse] = field(default_factory=dict)
    """What a server answers that has seen nothing, by turn."""

    async def run(self) -> None:
        with tempfile.TemporaryDirectory(dir=_scratch()) as directory:
            disk = Path(directory)
            async with self._server(disk / "chat") as client:
                chat = await self._chat(client)
            async with self._server(disk / "chat") as client:
                await self._next(client, RESTARTED, chat[:-1], chat[-1]["content"])
            async with self._server(disk / "users") as client:
                await self._users(client)
        if self.side == OURS:
            await self._check()

    async def _chat(self, client: Client) -> list[dict[str, str]]:
        """The chat as it is in the end, with its last answer."""
        chat = self.work.history(self._prompts("chat"))
        await self._ask(client, FIRST, chat, 0)
        chat = await self._next(client, NEXT, chat, self._last_answer)
        words = self._last_answer.split()
        chat += [_message("assistant", " ".join(words[len(words) // 2 :])), self._own_text(STRIPPED)]
        await self._ask(client, STRIPPED, chat, len(chat) - 2)
        answer = self._last_answer
        edited = [*chat, _message("assistant", answer), self._own_text(EDITED)]
        edited[-3] = self._own_text(FIRST)
        await self._ask(client, EDITED, edited, len(edited) - 3)
        return [*await self._next(client, BACK, chat, answer), _message("assistant", self._last_answer)]

    async def _next(
        self, client: Client, turn: Turn, chat: Sequence[dict[str, str]], answer: str
    ) -> list[dict[str, str]]:
        """The chat goes on with the answer that the server gave."""
        longer = [*chat, _message("assistant", answer), self._own_text(turn)]
        await self._ask(client, turn, longer, len(longer) - 1)
        return longer

    async def _users(self, client: Client) -> None:
        prompts = self._prompts("users")
        system = _message("system", prompts.text(self.work.system_tokens))
        for number in range(self.work.users):
            texts = [system, _message("user", prompts.text(self.work.message_tokens))]
            turn = USERS if number > 1 else SECOND if number else Turn("first user", "", None)
            await self._ask(client, turn, texts, 1)

    async def _ask(self, client: Client, turn: Turn, messages: Sequence[dict[str, str]], same: int) -> None:
        """`same`: how many of the messages the server has seen in this place."""
        self.setup.view.say(f"{self.setup.shown(self.side)}: {turn.label or turn.key}")
        answer = await client.chat(messages, self.work.answer_tokens)
        client.raise_for_errors()
        known = self.count(messages[:same], False) if same else 0
        asked = _Asked(list(messages), self.count(messages, True) - known, answer)
        self.asked.setdefault(turn.key, []).append(asked)

    @property
    def _last_answer(self) -> str:
        return list(self.asked.values())[-1][-1].answer.text

    def _own_text(self, turn: Turn) -> dict[str, str]:
        return _message("user", self._prompts(turn.key).text(self.work.message_tokens))

    def _prompts(self, what: str) -> Prompts:
        return self.setup.prompts(f"{self.work.title} {self.repeat} {what}")

    async def _check(self) -> None:
        for turn in (*CHAT, USERS)[: self.work.checks]:
            if turn.key in self.asked:
                async with self._server(None) as client:
                    self.setup.view.say(f"the answer without a cache: {turn.label}")
                    self.alone[turn.key] = await client.chat(self.asked[turn.key][-1].messages, self.work.answer_tokens)
                    client.raise_for_errors()

    @asynccontextmanager
    async def _server(self, disk: Path | None) -> AsyncIterator[Client]:
        """A new one, warm; ours keeps K/V in this directory."""
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(self._started(disk))
            client = await stack.enter_async_context(Client(server.url))
            await warm_up(client, self.setup.prompts("warm-up"))
            self.facts = {**server.facts, **self.facts}
            self.facts.setdefault("busy_percent_before", await busy_at_rest())
            yield client

    def _started(self, disk: Path | None) -> Any:
        setup, work = self.setup, self.work
        if self.side != OURS:
            swa_full = self.side == WHOLE_WINDOWS
            return start_llama_server(setup.model_file, setup.threads, work.needs, swa_full=swa_full)
        settings: dict[str, Any] = {"kv.disk.enabled": disk is not None}
        if disk is not None:
            settings["kv.disk.directory"] = str(disk)
        settings = {"resources.max_context_length": work.needs.room, **settings, **setup.settings}
        return start_cllm(setup.model, setup.threads, setup.backend, settings, stop_s=STOP_S)

    def result(self, partial: str | None) -> Run:
        metrics: Metrics = {}
        for turn in TURNS:
            asked = self.asked.get(turn.key, [])
            if asked:
                computed, new = sum(one.computed for one in asked), sum(one.new for one in asked)
                metrics[f"{turn.key}_computed"] = computed
                metrics[f"{turn.key}_ttft_s"] = sum(one.answer.ttft for one in asked) / len(asked)
                if turn != FIRST:
                    metrics[f"{turn.key}_over_new"] = computed / new
        if self.alone:
            metrics["checked"] = len(self.alone)
            metrics["unequal"] = sum(alone.text != self.asked[key][-1].answer.text for key, alone in self.alone.items())
        if (alone := self.alone.get(RESTARTED.key)) is not None:
            metrics["restarted_share"] = metrics["restarted_ttft_s"] / alone.ttft
        described = {key: [one.described() for one in asked] for key, asked in self.asked.items()}
        answers = [one.answer for asked in self.asked.values() for one in asked]
        alone_s = {key: answer.ttft for key, answer in self.alone.items()}
        facts = {**self.facts, "turns": described, "computed_alone_s": alone_s}
        return Run(self.side, self.repeat, metrics, facts, answers, partial=partial)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _scratch() -> Path:
    place = cache_dir() / "bench"
    place.mkdir(parents=True, exist_ok=True)
    return place
