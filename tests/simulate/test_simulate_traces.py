"""Traces: made-up ones keep their promises, files are read as they are, and a broken line is named."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

import pytest

from cllm.errors import ConfigError
from cllm_bench.simulate.files import FileTrace, TraceError
from cllm_bench.simulate.synthetic import KINDS, SHAPES, Shape, SyntheticTrace, parse_shape
from cllm_bench.simulate.traces import TOKEN_IDS, TokenSource, Trace, TracedRequest, spell
from simulate_kit import ListTrace

MOONCAKE = """\
{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]}
{"timestamp": 0, "input_length": 1100, "output_length": 490, "hash_ids": [0, 14, 15]}
{"timestamp": 3052, "input_length": 512, "output_length": 1, "hash_ids": [0]}
"""


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "trace.jsonl"
    file.write_text(text, encoding="utf-8")
    return file


def all_of(trace: Trace) -> Iterator[TracedRequest]:
    def walk(request: TracedRequest) -> Iterator[TracedRequest]:
        yield request
        for follower in request.followers:
            yield from walk(follower)

    for request in trace:
        yield from walk(request)


# -- files ---------------------------------------------------------------------------------------------------------


def test_mooncake_lines_are_read_as_they_are(tmp_path: Path) -> None:
    trace = FileTrace(write(tmp_path, MOONCAKE))
    first, second, third = list(trace)
    assert trace.requests == 3
    assert [request.arrival for request in trace] == [0.0, 0.0, 3.052]
    assert (first.prompt_length, first.answer_length) == (6758, 500)
    prompts = [spell(request.prompt) for request in (first, second, third)]
    assert prompts[0][:512] == prompts[1][:512] == prompts[2], "hash 0 is the same text everywhere"
    assert not set(prompts[0][512:]) & set(prompts[1][512:]), "other hashes are other text"
    answers = {token for request in trace for token in spell(request.answer)}
    assert not answers & set(prompts[0])


def test_tokens_and_seconds_can_be_given(tmp_path: Path) -> None:
    lines = [
        {"arrival": 0.25, "tokens": [5, 6, 7], "output_tokens": [8, 9]},
        {"arrival": 1.5, "tokens": [5, 6, 7, 8, 9, 1], "output_length": 3},
        {"arrival": 2, "input_length": 4, "output_length": 3, "model": "ignored"},
    ]
    trace = FileTrace(write(tmp_path, "\n\n".join(map(json.dumps, lines))))
    first, second, third = list(trace)
    assert first.prompt == array("i", [5, 6, 7]) and first.answer == array("i", [8, 9])
    assert (second.arrival, second.prompt_length, second.answer_length) == (1.5, 6, 3)
    assert (third.prompt_length, third.answer_length) == (4, 3)


def test_hashes_may_stand_for_another_number_of_tokens(tmp_path: Path) -> None:
    line = {"timestamp": 0, "input_length": 40, "output_length": 1, "hash_ids": [7, 9, 7]}
    (request,) = FileTrace(write(tmp_path, json.dumps(line)), hash_tokens=16)
    prompt = spell(request.prompt)
    assert len(prompt) == 40 and prompt[:8] == prompt[32:]


def test_a_file_can_be_cut_and_stretched(tmp_path: Path) -> None:
    lines = [json.dumps({"arrival": n, "input_length": 4, "output_length": 3}) for n in range(11)]
    file = write(tmp_path, "\n".join(lines))
    assert FileTrace(file, requests=4).requests == 4
    arrivals = [request.arrival for request in FileTrace(file, rate=2.2)]
    assert arrivals == pytest.approx([n * 0.5 for n in range(11)])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "it is not JSON"),
        ("[1, 2]", "it is not a JSON object"),
        ('{"input_length": 5, "output_length": 5}', "neither timestamp"),
        ('{"timestamp": -1, "input_length": 5, "output_length": 5}', "timestamp is -1"),
        ('{"timestamp": "0", "input_length": 5, "output_length": 5}', "timestamp is '0'"),
        ('{"timestamp": 99, "output_length": 5}', "input_length is None"),
        ('{"timestamp": 99, "input_length": 0, "output_length": 5}', "input_length is 0"),
        ('{"timestamp": 99, "input_length": 5, "output_length": 2.5}', "output_length is 2.5"),
        ('{"timestamp": 99, "input_length": 5, "output_length": true}', "output_length is True"),
        ('{"timestamp": 99, "input_length": 600, "output_length": 5, "hash_ids": [1]}', "makes 2 blocks of 512"),
        ('{"timestamp": 99, "input_length": 5, "output_length": 5, "hash_ids": ["a"]}', "hash_ids must be"),
        ('{"timestamp": 99, "tokens": [], "output_length": 5}', "tokens must be a list"),
        ('{"timestamp": 99, "tokens": [1, "b"], "output_length": 5}', "tokens must be a list"),
        ('{"timestamp": 99, "tokens": [4294967296], "output_length": 5}', "tokens must be a list"),
        ('{"timestamp": 10, "input_length": 5, "output_length": 5}', "before the one above: sort the file"),
    ],
)
def test_a_broken_line_is_named_before_anything_runs(tmp_path: Path, line: str, reason: str) -> None:
    good = '{"timestamp": 50, "input_length": 5, "output_length": 5}'
    file = write(tmp_path, f"{good}\n\n{line}\n{good}\n")
    with pytest.raises(TraceError) as caught:
        FileTrace(file)
    assert str(caught.value).startswith(f"{file} line 3: ") and reason in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "prompt", "answer", "repeated"), [("conversation", 12_035, 343, 37.4), ("toolagent", 8_596, 182, 59.0)]
)
def test_made_up_traces_are_like_mooncakes(kind: str, prompt: float, answer: float, repeated: float) -> None:
    """Mean lengths and what came before, as Mooncake's public traces have them."""
    requests = list(all_of(SyntheticTrace(kind, 10_000, 3.0, SHAPES[kind], seed=0)))
    assert mean(request.prompt_length for request in requests) == pytest.approx(prompt, rel=0.05)
    assert mean(request.answer_length for request in requests) == pytest.approx(answer, rel=0.05)
    assert 100 * repeated_share(requests, 512) == pytest.approx(repeated, abs=3)


def repeated_share(requests: list[TracedRequest], block_tokens: int) -> float:
    """The share of all prompt tokens that stand in blocks which came before, behind the same text."""
    known: set[tuple[int, ...]] = set()
    again = 0
    for request in requests:
        beginning: tuple[int, ...] = ()
        for block in blocks_of(request, block_tokens):
            tokens = sum(block[1::2])
            beginning = (hash((beginning, block)),)
            again += tokens if beginning in known else 0
            known.add(beginning)
    return again / sum(request.prompt_length for request in requests)


def blocks_of(request: TracedRequest, block_tokens: int) -> Iterator[tuple[int, ...]]:
    """The prompt's spans, cut into blocks; the last one may not be full."""
    assert isinstance(request.prompt, tuple)
    pieces: list[int] = []
    room = block_tokens
    for first, count in request.prompt:
        start, end = first, first + count
        while start < end:
            taken = min(room, end - start)
            pieces += (start, taken)
            start, room = start + taken, room - taken
            if room == 0:
                yield tuple(pieces)
                pieces, room = [], block_tokens
    if pieces:
        yield tuple(pieces)


def test_files_that_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="holds no requests"):
        FileTrace(write(tmp_path, "\n"))
    with pytest.raises(TraceError, match="cannot be read"):
        FileTrace(tmp_path / "absent.jsonl")
    file = tmp_path / "binary.jsonl"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="cannot be read"):
        FileTrace(file)


# -- made up -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_the_same_trace_every_time(kind: str) -> None:
    trace = SyntheticTrace(kind, 200, 2.0, Shape(), seed=5)
    assert list(trace) == list(trace) == list(SyntheticTrace(kind, 200, 2.0, Shape(), seed=5))
    assert list(trace) != list(SyntheticTrace(kind, 200, 2.0, Shape(), seed=6))


@pytest.mark.parametrize("kind", KINDS)
def test_as_many_requests_come_as_were_asked_for_in_order(kind: str) -> None:
    trace = SyntheticTrace(kind, 777, 2.0, Shape(), seed=1)
    assert len(list(all_of(trace))) == trace.requests == 777
    arrivals = [request.arrival for request in trace]
    assert arrivals == sorted(arrivals) and arrivals[0] >= 0


def test_the_rate_is_kept() -> None:
    trace = list(SyntheticTrace("poisson", 20_000, 4.0, Shape(), seed=1))
    assert len(trace) / trace[-1].arrival == pytest.approx(4.0, rel=0.1)


def test_a_rate_does_not_change_what_is_asked() -> None:
    slow, fast = (list(SyntheticTrace("poisson", 50, rate, Shape(), seed=1)) for rate in (1.0, 10.0))
    assert [(r.prompt, r.answer) for r in slow] == [(r.prompt, r.answer) for r in fast]
    assert slow[-1].arrival == pytest.approx(10 * fast[-1].arrival)


def gaps_spread(trace: SyntheticTrace) -> float:
    """Variance of the time between arrivals over its square mean: 1 for poisson."""
    arrivals = [request.arrival for request in trace]
    gaps = [after - before for before, after in pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    return sum((gap - mean) ** 2 for gap in gaps) / len(gaps) / mean**2


def test_arrivals_are_independent() -> None:
    assert gaps_spread(SyntheticTrace("poisson", 5000, 1.0, Shape(), 1)) == pytest.approx(1.0, abs=0.15)


def test_lengths_follow_their_distribution() -> None:
    shape = parse_shape("poisson", "prompt=lognormal:300:0.5,output=7,systems=0,longest=600")
    requests = list(SyntheticTrace("poisson", 3000, 1.0, shape, seed=1))
    assert median(request.prompt_length for request in requests) == pytest.approx(300, rel=0.1)
    assert max(request.prompt_length for request in requests) == 600
    assert {request.answer_length for request in requests} == {7}


def test_system_prompts_are_shared_by_popularity() -> None:
    shape = Shape(system="30", systems=3)
    openings = [spell(request.prompt)[:30].tobytes() for request in SyntheticTrace("poisson", 2000, 1.0, shape, 1)]
    counts = sorted((openings.count(opening) for opening in set(openings)), reverse=True)
    assert len(counts) == 3 and counts[0] > 900 and counts[1] > counts[2]


def test_a_chat_goes_on_from_what_was_said() -> None:
    shape = Shape(turns=6.0, branch=0.5, longest=2000)
    trace = SyntheticTrace("chats", 500, 1.0, shape, seed=2)
    branched = 0
    for request in all_of(trace):
        said = spell(request.prompt) + spell(request.answer)
        branched += len(request.followers) == 2
        for follower in request.followers:
            assert spell(follower.prompt)[: len(said)] == said and follower.arrival >= 0
            assert follower.prompt_length > len(said)
        if len(request.followers) == 2:
            one, other = (spell(follower.prompt)[len(said) :] for follower in request.followers)
            assert not set(one) & set(other)
    assert branched > 20


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("nonsense", "write key=value"),
        ("size=3", "write key=value with one of prompt, output"),
        ("prompt=normal:3", "lengths are written as a number of tokens above 0, or as uniform"),
        ("prompt=lognormal:3", "lengths are written"),
        ("output=-3", "a number of tokens above 0"),
        ("output=exponential:x", "must be a number above 0"),
        ("output=uniform:9:3", "low end is above"),
        ("systems=2.5", "a whole number from 0 to 1000"),
        ("branch=1", "from 0 to 0.9"),
        ("turns=inf", "of at least 1"),
    ],
)
def test_impossible_shapes_are_named(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_shape("chats", text)


def test_token_ids_begin_again_before_they_overflow() -> None:
    source = TokenSource()
    assert source.take(TOKEN_IDS - 5) == (0, TOKEN_IDS - 5)
    first, count = source.take(10)
    assert (first, count) == (0, 10)
    assert len(spell(((TOKEN_IDS - 10, 10),))) == 10


def test_a_list_of_requests_counts_those_that_follow() -> None:
    last = TracedRequest(0.0, ((0, 5),), ((5, 5),))
    middle = TracedRequest(0.0, ((0, 5),), ((5, 5),), (last, last))
    trace = ListTrace("x", (TracedRequest(0.0, ((0, 5),), ((5, 5),), (middle,)),))
    assert trace.requests == 4
