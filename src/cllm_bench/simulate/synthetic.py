"""Traces that are made up: how requests arrive, how long they are and what they share, from a few parameters.

poisson       requests independent of each other, at a steady rate
chats         conversations: a turn is sent when the one before was answered and read; some branch into two
conversation  chats as long, and with as much to share, as those of Mooncake's conversation trace
toolagent     the same for its trace of tools and agents: a few long system prompts, and tools that answer at once
agents        coding agents: long sessions behind a few long system prompts with tools; every turn sends the results of
              tools and leaves out the reasoning of earlier ones; some start subagents, some are abandoned
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import numpy as np

from cllm.errors import ConfigError
from cllm_bench.simulate.lengths import Lengths, parse_lengths
from cllm_bench.simulate.settings import parse_number
from cllm_bench.simulate.traces import MESSAGE_END, Span, TokenSource, TracedRequest, length

_BATCH = 4096
"""Random numbers are drawn so many at a time."""

_DEEPEST = 64
"""Most turns of a conversation."""


@dataclass(frozen=True)
class Shape:
    """The parameters, with the names they have on the command line (a dash for an underscore)."""

    prompt: str = "lognormal:256:0.8"
    """Tokens of a prompt beside the system prompt; of a chat's first message."""
    output: str = "lognormal:96:0.8"
    system: str = "200"
    """Tokens of a system prompt."""
    systems: int = 8
    """Different system prompts; 0: none."""
    popularity: float = 2.0
    """How many times as popular each of them is as the next one; 1: all are equally popular."""
    longest: int = 4096
    """No prompt and no answer is longer."""
    turns: float = 4.0
    """Mean number of turns in a chat."""
    message: str = "lognormal:40:0.8"
    """Tokens of a chat's later messages."""
    think_s: float = 20.0
    """Mean time from an answer to the next message."""
    branch: float = 0.1
    """Share of turns that are continued twice: an edited or repeated question."""
    reasoning: float = 0.0
    """Share of an answer that the next turn leaves out."""
    read: float = 1.0
    """Share of turns after which somebody thinks; after the others a tool answers."""
    tool_s: float = 0.0
    """Mean time until it does."""
    subagents: float = 0.0
    """Share of turns that wait for a session of another agent, a fifth as long, with a system prompt of its own."""
    abandoned: float = 0.0
    """Share of sessions that end at any turn; the others have between 0.8 and 1.6 times as many as the mean."""


SHAPES = {
    "poisson": Shape(),
    "chats": Shape(),
    "conversation": Shape(
        prompt="lognormal:4800:1.25",
        output="uniform:1:690",
        system="880",
        systems=1,
        longest=131_072,
        turns=1.55,
        message="lognormal:30:3",
        think_s=175.0,
        branch=0.05,
    ),
    "toolagent": Shape(
        prompt="lognormal:2200:1.2",
        output="lognormal:100:1.1",
        system="lognormal:3400:0.6",
        systems=40,
        popularity=1.15,
        longest=131_072,
        turns=1.5,
        message="lognormal:250:1.3",
        think_s=8.0,
        branch=0.05,
    ),
    "agents": Shape(
        prompt="lognormal:300:0.8",
        output="lognormal:400:0.7",
        system="uniform:10000:15000",
        systems=6,
        popularity=1.5,
        longest=131_072,
        turns=25,
        message="lognormal:500:1.3",
        think_s=180.0,
        branch=0.01,
        reasoning=0.6,
        read=0.12,
        tool_s=4.0,
        subagents=0.04,
        abandoned=0.25,
    ),
}
"""The parameters of each kind where nothing else is said."""

KINDS = tuple(SHAPES)
CLOSED_KINDS = ("chats", "conversation", "toolagent", "agents")

_LIMITS: dict[str, tuple[float, ...]] = {
    "systems": (0, 1000),
    "popularity": (1,),
    "longest": (1, 1 << 24),
    "turns": (1,),
    "branch": (0, 0.9),
    "think_s": (0,),
    "tool_s": (0,),
    **dict.fromkeys(("reasoning", "read", "subagents", "abandoned"), (0, 1)),
}
"""The least and the most of a value; others are above 0."""


def parse_shape(kind: str, text: str) -> Shape:
    """`key=value,key=value`; the rest is as usual for this kind of trace."""
    shape = SHAPES[kind]
    known = {field.name.replace("_", "-"): field for field in fields(Shape)}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if key not in known or not equals:
            raise ConfigError(f"--shape {part}: write key=value with one of {', '.join(known)}")
        field = known[key]
        read: str | float = value
        if field.type == "str":
            parse_lengths(key, value, shape.longest)
        else:
            whole = isinstance(getattr(shape, field.name), int)
            read = parse_number(f"--shape {key}", value, *_LIMITS.get(field.name, (1e-9,)), whole=whole)
        shape = replace(shape, **{field.name: read})  # type: ignore[arg-type]
    return shape


class SyntheticTrace:
    """`rate` is in requests a second, all turns of chats included."""

    def __init__(self, kind: str, requests: int, rate: float, shape: Shape, seed: int) -> None:
        self.name = f"{kind}, {requests:,} requests at {rate:g}/s, seed {seed}"
        self._kind = kind
        self._closed = kind in CLOSED_KINDS
        self.requests = requests
        self._rate = rate
        self._shape = shape
        self._seed = seed

    def __iter__(self) -> Iterator[TracedRequest]:
        maker = _RequestGenerator(self._shape, np.random.default_rng(self._seed))
        # Arrivals have a generator of their own, so that lengths stay what they are when the rate is varied.
        arrivals = self._arrivals(np.random.default_rng([self._seed, 1]))
        if self._closed:
            yield from self._chats(maker, arrivals)
            return
        for _, arrival in zip(range(self.requests), arrivals, strict=False):
            yield maker.request(arrival)

    def _chats(self, maker: _RequestGenerator, arrivals: Iterator[float]) -> Iterator[TracedRequest]:
        left = self.requests
        for arrival in arrivals:
            if left == 0:
                return
            make = maker.session if self._kind == "agents" else maker.conversation
            first, turns = make(arrival, left)
            left -= turns
            yield first

    def _arrivals(self, rng: np.random.Generator) -> Iterator[float]:
        shape, rate = self._shape, self._rate
        if self._kind == "agents":
            return _poisson(rng, rate / _session_turns(shape))
        if self._closed:
            # A turn that branches has two continuations, so a conversation is longer than its mean depth.
            going_on = (1 - 1 / shape.turns) * (1 + shape.branch)
            turns = shape.turns if going_on >= 1 else 1 / (1 - going_on)
            return _poisson(rng, rate / turns)
        return _poisson(rng, rate)


def _session_turns(shape: Shape) -> float:
    """On average, with those of subagents."""
    own = shape.turns * (1.2 - 0.7 * shape.abandoned)
    return own * (1 + shape.subagents * own / 5)


def _poisson(rng: np.random.Generator, rate: float) -> Iterator[float]:
    now = 0.0
    while True:
        for gap in rng.exponential(1 / rate, _BATCH).tolist():
            now += gap
            yield now


class _RequestGenerator:
    """Draws what requests consist of."""

    def __init__(self, shape: Shape, rng: np.random.Generator) -> None:
        self._shape = shape
        self._source = TokenSource()
        system_lengths = parse_lengths("system", shape.system, shape.longest).draw(rng, shape.systems)
        self._systems = [self._source.take(count) for count in system_lengths]
        self._prompts = _stream(rng, parse_lengths("prompt", shape.prompt, shape.longest))
        self._outputs = _stream(rng, parse_lengths("output", shape.output, shape.longest))
        self._messages = _stream(rng, parse_lengths("message", shape.message, shape.longest))
        self._uniforms = _uniforms(rng)

    def request(self, arrival: float) -> TracedRequest:
        return TracedRequest(arrival, self._opening(), self._answer())

    def conversation(self, arrival: float, most: int) -> tuple[TracedRequest, int]:
        """The first turn, with the others as its followers, and how many there are: at most `most`."""
        self._left = most
        first = self._turn(arrival, self._opening(), 1)
        return first, most - self._left

    def _turn(self, arrival: float, prompt: tuple[Span, ...], depth: int) -> TracedRequest:
        self._left -= 1
        shape = self._shape
        answer = self._answer()
        text = (*prompt, *answer)
        followers: list[TracedRequest] = []
        goes_on = depth < _DEEPEST and next(self._uniforms) < 1 - 1 / shape.turns
        room = shape.longest - length(text)
        if goes_on and room > 0:
            continuations = 2 if next(self._uniforms) < shape.branch else 1
            for _ in range(continuations):
                if self._left > 0:
                    message = self._source.take(min(next(self._messages), room))
                    think = -math.log(1 - next(self._uniforms)) * shape.think_s
                    followers.append(self._turn(think, (*text, message), depth + 1))
        return TracedRequest(arrival, prompt, answer, tuple(followers))

    def session(self, arrival: float, most: int) -> tuple[TracedRequest, int]:
        """As `conversation`, of an agent."""
        self._left = most
        first = self._agent_turn(arrival, self._task(), self._session_length(), None)
        return first, most - self._left

    def _task(self) -> tuple[Span, ...]:
        return tuple(part for span in self._opening() for part in (span, MESSAGE_END))

    def _session_length(self) -> int:
        shape = self._shape
        share = next(self._uniforms)
        times = share if next(self._uniforms) < shape.abandoned else 0.8 + 0.8 * share
        return max(1, round(times * shape.turns))

    def _agent_turn(
        self, arrival: float, prompt: tuple[Span, ...], left: int, then: Callable[[], TracedRequest] | None
    ) -> TracedRequest:
        """A turn, with `left` of its session, itself included; `then` makes what goes on behind a subagent's last."""
        self._left -= 1
        shape = self._shape
        ((first, count),) = answer = self._answer()
        reasoning = min(count - 1, round(count * shape.reasoning))
        text = (*prompt, (first + reasoning, count - reasoning), MESSAGE_END)
        room = shape.longest - length(text) - 2

        def go_on() -> TracedRequest:
            result = self._source.take(min(next(self._messages), room))
            return self._agent_turn(self._wait(), (*text, result, MESSAGE_END), left - 1, then)

        followers: list[TracedRequest] = []
        if left > 1 and room > 0:
            for _ in range(1 + (next(self._uniforms) < shape.branch)):
                if then is None and next(self._uniforms) < shape.subagents and self._left > 1:
                    turns = max(1, self._session_length() // 5)
                    followers.append(self._agent_turn(shape.tool_s, self._task(), turns, go_on))
                elif self._left > 0:
                    followers.append(go_on())
        elif then is not None and self._left > 0:
            followers.append(then())
        return TracedRequest(arrival, prompt, answer, tuple(followers))

    def _wait(self) -> float:
        mean = self._shape.think_s if next(self._uniforms) < self._shape.read else self._shape.tool_s
        return -math.log(1 - next(self._uniforms)) * mean

    def _opening(self) -> tuple[Span, ...]:
        own = self._source.take(next(self._prompts))
        if not self._systems:
            return (own,)
        return (self._systems[self._draw_system(next(self._uniforms))], own)

    def _draw_system(self, uniform: float) -> int:
        """Geometric, cut off after the last one."""
        popularity, systems = self._shape.popularity, len(self._systems)
        if popularity == 1.0:
            return int(uniform * systems)
        beyond = popularity**-systems
        return min(int(-math.log(1 - uniform * (1 - beyond), popularity)), systems - 1)

    def _answer(self) -> tuple[Span]:
        return (self._source.take(next(self._outputs)),)


def _stream(rng: np.random.Generator, lengths: Lengths) -> Iterator[int]:
    while True:
        yield from lengths.draw(rng, _BATCH)


def _uniforms(rng: np.random.Generator) -> Iterator[float]:
    while True:
        yield from rng.random(_BATCH).tolist()
