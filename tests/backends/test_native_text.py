"""The native engine on the real model computes what llama.cpp computes, on two texts.

* `chats.txt`: questions of ours and the model's own answers, with the chat template around them, as a server sees them.
* The text of `cllm bench kv-types`: prose, dialogue, code and other languages that the model has not seen (perplexity
  19).

Both programs round activations to 8 bits, and after a few layers their roundings have parted. Where the model hesitates
between two tokens, that decides: on that text llama.cpp with flash attention agrees with llama.cpp without it on
96.5 % of all positions, and either agrees with the same weights in F32 on 96.5 to 97 %. So two engines that are both
right agree there on about 95 %; in chats, where few choices are close, on more than 98 %.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cllm.models.gguf import GGUFModel
from cllm.models.registry import resolve
from cllm.text.tokenizer import Tokenizer, load_tokenizer
from cllm_bench.quality.comparison import Comparison, log_softmax, logits_in_turn
from cllm_bench.quality.llama import LlamaReference
from cllm_bench.quality.texts import LONGEST, TEXT, parts_of
from cllm_bench.workloads.kv_types import REFERENCE, Pair, compare_on
from repository import DATA
from step_kit import Rig
from thorough import EXHAUSTIVE, exhaustive, slow

pytestmark = [slow, exhaustive, pytest.mark.model, pytest.mark.timeout(600)]

SHARE = 1.0 if EXHAUSTIVE else 0.96
"""Of the share of equal tokens that all of a text must reach, what a sample must."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(GGUFModel.open(resolve("smollm2")))


@pytest.fixture(scope="module")
def text(tokenizer: Tokenizer) -> list[Sequence[int]]:
    return some(parts_of(tokenizer.encode(TEXT.read_text("utf-8")), LONGEST))


@pytest.fixture(scope="module")
def chats(tokenizer: Tokenizer) -> list[Sequence[int]]:
    user = "<|im_start|>user"
    _, *found = (DATA / "chats.txt").read_text("utf-8").split(user)
    return some([tokenizer.encode(user + chat, special=True) for chat in found])


def some(sequences: list[Sequence[int]]) -> list[Sequence[int]]:
    """All of them, or as a sample the beginnings of four."""
    return sequences if EXHAUSTIVE else [tokens[:200] for tokens in sequences[:: -(-len(sequences) // 4)]]


@pytest.fixture(scope="module")
def smollm2() -> Rig:
    return Rig(resolve("smollm2"), blocks=LONGEST // 16)


def compare(smollm2: Rig, sequences: Sequence[Sequence[int]]) -> Comparison:
    """f16 K/V against llama.cpp."""
    assert sum(map(len, sequences)) >= (4000 if EXHAUSTIVE else 300)
    found = Comparison()
    smollm2.allocate(blocks=LONGEST // 16)
    with LlamaReference(resolve("smollm2"), context=LONGEST) as llama:
        for tokens in sequences:
            theirs = llama.logits(tokens)
            for begin, ours in logits_in_turn(smollm2.engine, smollm2.n_vocab, tokens):
                following = tokens[begin + 1 : begin + 1 + len(ours)]
                rows = slice(begin, begin + len(following))
                found.add(log_softmax(ours[: len(following)]), log_softmax(theirs[rows]), following)
    print(f"\nsmollm2: {found}")
    return found


def test_chats_are_what_llama_cpp_computes(smollm2: Rig, chats: list[Sequence[int]]) -> None:
    found = compare(smollm2, chats)
    assert abs(found.perplexity_change) <= 0.005, str(found)
    assert found.same_top >= SHARE * 0.98 * found.positions, str(found)
    assert found.divergence <= 0.005 * found.positions, str(found)


def test_text_is_what_llama_cpp_computes(smollm2: Rig, text: list[Sequence[int]]) -> None:
    found = compare(smollm2, text)
    assert abs(found.perplexity_change) <= 0.005, str(found)
    assert found.same_top >= SHARE * 0.94 * found.positions, str(found)
    assert found.clear >= SHARE * 0.9 * found.positions, str(found)
    assert found.same_where_clear >= SHARE * 0.98 * found.clear, str(found)
    assert found.divergence <= 0.005 * found.positions, str(found)


def test_quantised_kv_costs_little(smollm2: Rig, text: list[Sequence[int]]) -> None:
    """Limits: the change of perplexity, the mean divergence, the share of equal top tokens."""
    limits = {
        Pair("q8_0", "q8_0"): (0.005, 0.006, 0.94),
        Pair("q4_0", "q4_0"): (0.03, 0.04, 0.86),
    }
    found = {pair: Comparison() for pair in (REFERENCE, *limits)}
    for tokens in text:
        compare_on(smollm2.engine, smollm2.n_vocab, tokens, found)
    for pair, (change, divergence, agreement) in limits.items():
        of = found[pair]
        print(f"\nsmollm2, K/V {pair} against f16: {of}")
        assert of.perplexity_change != 0, f"{pair} has no effect"
        assert abs(of.perplexity_change) <= change / SHARE**10, f"{pair}: {of}"
        assert of.mean_divergence <= divergence, f"{pair}: {of}"
        assert of.agreement >= SHARE * agreement, f"{pair}: {of}"
