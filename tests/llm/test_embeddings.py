"""EmbeddingJob and log probabilities of prompts on real engines: equal whatever is cached or beside them."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cllm import LLM, AsyncLLM, SamplingParams
from cllm.backends.base import Chunk, Pooling, PromptScores, Scoring
from cllm.config import load_config
from cllm.engine.submission import Submission
from cllm.errors import InvalidRequestError, OverloadedError, StepAbortedError
from cllm.kv.ops import BlockGeometry, SlotGeometry
from cllm.loading.embedder import EMBEDDING
from cllm.tasks.embedding import EmbeddingJob
from native_kit import build_model, write_model
from step_of import rows_of, step_of

SETTINGS: dict[str, Any] = {"kv.disk.enabled": False, "resources.kv_cache_max_memory_mb": 16, "backend.threads": 2}
SCORED = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=4, ignore_eos=True)
TEXTS = [f"text number {number} " + "of some length " * (number % 7) for number in range(24)]


def asked(texts: Sequence[Sequence[int]]) -> list[Submission]:
    return [Submission(text, EMBEDDING, embeds=True) for text in texts]


def file(folder: Path, pooling: int | None = None, **options: Any) -> str:
    tiny = build_model(weight_type="q4_1", **options)
    if pooling is not None:
        tiny = tiny.with_metadata(pooling_type=pooling)
    return str(tiny.write(folder / "tiny.gguf"))


def lists(scores: PromptScores | None) -> list[Any]:
    assert scores is not None
    return [column.tolist() for column in scores]


@pytest.mark.parametrize("pooling", [None, 1, 2, 3])
def test_embeddings_are_equal_to_the_bit_cached_beside_others_and_alone(tmp_path: Path, pooling: int | None) -> None:
    path = file(tmp_path, pooling)
    with LLM(path, backend="native", settings=SETTINGS) as llm:
        together = llm.embed(TEXTS)
        cached = llm.embed(TEXTS)
    assert np.array_equal(together, cached)
    small = {**SETTINGS, "scheduler.max_step_tokens": 7}
    with LLM(path, backend="native", settings=small) as llm:
        for text, row in zip(TEXTS[:6], together, strict=False):
            assert np.array_equal(llm.embed(text)[0], row)
            assert np.linalg.norm(row) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("backend", ["native", "llama_cpp"])
def test_the_pooling_is_the_files(tmp_path: Path, backend: str) -> None:
    """Of one token, all are the same; of more, none."""
    found = {}
    for pooling in (1, 2, 3):
        (tmp_path / str(pooling)).mkdir()
        path = file(tmp_path / str(pooling), pooling)
        with LLM(path, backend=backend, settings=SETTINGS) as llm:
            found[pooling] = llm.embed([[5], [5, 6, 7, 8]])
    assert np.abs(found[1][0] - found[2][0]).max() < 1e-6 and np.abs(found[1][0] - found[3][0]).max() < 1e-6
    assert np.abs(found[2][1] - found[2][0]).max() < 2e-2, "the first token sees nothing else"
    assert np.abs(found[1][1] - found[3][1]).max() > 0.02 and np.abs(found[1][1] - found[2][1]).max() > 0.02


def test_llama_cpp_embeds_and_scores_as_native_does(tmp_path: Path) -> None:
    path = file(tmp_path, 1)
    with LLM(path, backend="native", settings=SETTINGS) as llm:
        ours, scored = llm.embed(TEXTS), llm.generate(TEXTS[:5], SCORED, progress=False)
    with LLM(path, backend="llama_cpp", settings={**SETTINGS, "backend.llama_cpp.n_seq_max": 4}) as llm:
        theirs, again = llm.embed(TEXTS), llm.generate(TEXTS[:5], SCORED, progress=False)
    assert (ours * theirs).sum(axis=1).min() > 0.99
    for one, other in zip(scored, again, strict=True):
        assert one.prompt_logprobs is not None and other.prompt_logprobs is not None
        assert np.abs(one.prompt_logprobs.logprobs - other.prompt_logprobs.logprobs).max() < 0.2


def test_llama_cpp_computes_short_texts_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each alone would be a pass over the weights, and those who wait for a token would wait for all of them."""
    from cllm.backends.llama_cpp import LlamaCppBackend
    from cllm.backends.llama_cpp.context import Context

    types: dict[str, Any] = {"kv_type_k": "f16", "kv_type_v": "f16", "flash_attention": True}
    path, passes, decode = Path(file(tmp_path, 1)), list[int](), Context.decode

    def counted(self: Context, chunks: Sequence[Chunk]) -> Any:
        passes.append(len(chunks))
        return decode(self, chunks)

    texts = [array("i", range(1, 4 + 9 * number)) for number in range(6)]
    with LlamaCppBackend(path, threads=1, n_batch=64, n_ubatch=64, mmap=True, mlock=False, **types) as backend:
        backend.allocate(SlotGeometry(8, 64))
        chunks = [Chunk(text, 0, 0, slot, asks=Pooling("mean")) for slot, text in enumerate(texts)]
        alone = []
        for chunk in chunks:
            alone.append(step_of(backend, [chunk]).read[0])
            backend.ops.remove(chunk.slot, 0)
        monkeypatch.setattr(Context, "decode", counted)
        together = step_of(backend, chunks[::-1]).read
    assert passes == [4, 2, 2, 1] and sorted(together) == list(range(6))
    for number, one in enumerate(alone):
        other = together[5 - number]
        assert one @ other / np.linalg.norm(one) / np.linalg.norm(other) > 0.999


def test_scores_are_equal_to_the_bit_and_those_of_the_logits(tmp_path: Path) -> None:
    path = file(tmp_path, n_vocab=20_000)  # of so many, logits of 209 rows are there at a time
    prompt = [number * 7 % 320 for number in range(300)]
    with LLM(path, backend="native", settings=SETTINGS) as llm:
        (plain,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
        (scored,) = llm.generate([prompt], SCORED)
        others = llm.generate([prompt, *TEXTS, prompt], SCORED, progress=False)
        generated = [llm.generate([prompt[: n + 1]], SamplingParams(temperature=0, max_tokens=1, logprobs=4))[0]
                     for n in (0, 9, 150, 298)]  # fmt: skip
    assert scored.token_ids == plain.token_ids and scored.cached_tokens == 0
    assert lists(others[0].prompt_logprobs) == lists(others[-1].prompt_logprobs) == lists(scored.prompt_logprobs)
    small = {**SETTINGS, "scheduler.max_step_tokens": 13, "backend.threads": 1}
    with LLM(path, backend="native", settings=small) as llm:
        assert lists(llm.generate([prompt], SCORED)[0].prompt_logprobs) == lists(scored.prompt_logprobs)
    scores = scored.prompt_logprobs
    assert scores is not None and len(scores.logprobs) == 299
    for row, answer in zip((0, 9, 150, 298), generated, strict=True):
        assert answer.logprobs is not None
        top = answer.logprobs[0].top
        assert scores.top_ids[row].tolist() == [token for token, _ in top]
        assert scores.top_logprobs[row].tolist() == [logprob for _, logprob in top]
        place = scores.top_ids[row].tolist()
        if prompt[row + 1] in place:
            rank = place.index(prompt[row + 1])
            assert (scores.ranks[row], scores.logprobs[row]) == (rank + 1, scores.top_logprobs[row][rank])
        else:
            assert scores.ranks[row] > 4


def test_native_refuses_what_does_not_fit_and_can_be_interrupted(tmp_path: Path) -> None:
    from cllm.backends.native import NativeBackend
    from cllm.errors import BackendError
    from cllm.models.gguf import GGUFModel

    model = GGUFModel.open(write_model(tmp_path / "tiny.gguf"))
    backend = NativeBackend(model, threads=1, instruction_set="auto", kv_type_k="f16", kv_type_v="f16")
    backend.allocate(BlockGeometry(4, 16))
    tokens = array("i", range(20))
    for asks in (Scoring(array("i", range(21)), 1), Scoring(array("i", [320]), 1), Scoring(array("i", [-1]), 1)):
        with pytest.raises(BackendError, match="refused"):
            step_of(backend, [Chunk(tokens, 0, 0, blocks=[0, 1], asks=asks)])
    chunk = Chunk(tokens, 0, 1, blocks=[0, 1], asks=Scoring(tokens[1:], 2))
    mixed = step_of(backend, [chunk, Chunk(tokens, 0, 0, blocks=[2, 3], asks=Pooling("mean"))])
    assert mixed.logits is not None
    expected, logits = rows_of(backend, [Chunk(tokens, 0, 1, blocks=[0, 1])]).copy(), mixed.logits
    assert np.array_equal(expected, logits) and set(mixed.read) == {0, 1}
    engine = backend._engine
    assert engine is not None
    stopped = pytest.raises(StepAbortedError)

    class Stops:
        def read_prompts(self, *_: object) -> bool:
            return False

    backend._engine = Stops()  # type: ignore[assignment]
    with stopped:
        step_of(backend, [chunk])
    backend._engine = engine
    backend.close()


async def test_a_full_queue_is_waited_for_unless_it_is_others_who_fill_it() -> None:
    config = load_config(
        overrides={"backend.type": "fake", "scheduler.max_queue": 2, "scheduler.max_running": 2}
    ).config
    async with AsyncLLM(config) as llm:
        texts = [[number % 250 + 1, 7, 8] for number in range(100)]
        vectors = await EmbeddingJob(llm, asked(texts)).compute()
        assert len(vectors) == 100
        held = [llm.submit([3] * 50, SamplingParams(max_tokens=3000, ignore_eos=True)) for _ in range(2)]
        while llm.executor.snapshot().running < 2:
            await asyncio.sleep(0.01)
        held += [llm.submit([3] * 50, SamplingParams(max_tokens=3000, ignore_eos=True)) for _ in range(2)]
        with pytest.raises(OverloadedError):
            await EmbeddingJob(llm, asked(texts)).compute()
        for generation in held:
            await generation.aclose()
        while llm.executor.snapshot().waiting:
            await asyncio.sleep(0.01)
        work = asyncio.ensure_future(EmbeddingJob(llm, asked(texts)).compute())
        await asyncio.sleep(0)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        while llm.executor.snapshot().running or llm.executor.snapshot().waiting:
            await asyncio.sleep(0.01)
        assert [vector.tolist() for vector in await EmbeddingJob(llm, asked(texts[:3])).compute()] == [
            vector.tolist() for vector in vectors[:3]
        ]


def test_what_cannot_be_embedded_is_said(tmp_path: Path) -> None:
    with LLM(backend="fake") as llm:
        assert llm.embed([]).shape == (0, 8)
        for wrong, name in (([[]], "prompt"), ([[400]], "prompt"), ([[5] * 5000], "prompt")):
            with pytest.raises(InvalidRequestError) as refused:
                llm.embed(wrong)
            assert refused.value.param == name
        for dimensions in (0, 9):
            with pytest.raises(InvalidRequestError) as refused:
                llm.embed("x", dimensions=dimensions)
            assert refused.value.param == "dimensions"
