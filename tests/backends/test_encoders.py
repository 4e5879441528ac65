"""Models that only embed or rank, through llama.cpp: loaded, served, and refused by name for all else."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from cllm import LLM, SamplingParams
from cllm.backends.base import Chunk, Pooling
from cllm.backends.llama_cpp.encoder import LlamaCppEncoder
from cllm.backends.llama_cpp.tokenizer import LlamaTokenizer
from cllm.config import load_config
from cllm.errors import BackendError, InvalidRequestError
from cllm.llm import AsyncLLM
from cllm.models.gguf import GGUFModel
from cllm.server.app import create_app
from encoder_kit import CLS, SEP, TOKENS, write_bert
from loading_kit import load_parts
from native_kit import build_model
from step_of import rows_of, step_of

SETTINGS: dict[str, Any] = {"kv.disk.enabled": False, "backend.threads": 1}


@pytest.fixture(scope="module", params=["mean", "cls"])
def bert(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("bert") / f"{request.param}.gguf", pooling=request.param)


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("bert") / "ranker.gguf", pooling="rank")


def test_words_become_tokens_of_the_file(bert: Path) -> None:
    tokenizer = LlamaTokenizer(GGUFModel.open(bert))
    ids = tokenizer.encode("The cats sat")
    assert [TOKENS[token] for token in ids] == ["[CLS]", "\u2581the", "\u2581cat", "s", "\u2581sat", "[SEP]"]
    assert tokenizer.encode("[SEP]", add_bos=False) != [SEP], "what a text says is no special token"
    assert tokenizer.encode("[SEP]", add_bos=False, special=True) == [SEP]
    assert tokenizer.decode(ids).strip() == "the cats sat" and tokenizer.token_text(CLS) == "[CLS]"
    with pytest.raises(InvalidRequestError, match="not in the vocabulary"):
        tokenizer.token_text(len(TOKENS))


def test_a_batch_gives_what_each_text_gives_alone(bert: Path) -> None:
    texts = ["the cat sat on the mat.", "who?", "what is a dog", "a", "the dog sat " * 8] * 9
    with LLM(str(bert), settings=SETTINGS) as llm:
        together = llm.embed(texts)
        assert together.shape == (45, 32)
        for text, row in zip(texts[:5], together, strict=False):
            alone = llm.embed(text)
            assert np.abs(alone[0] - row).max() < 1e-3 and np.linalg.norm(row) == pytest.approx(1.0, abs=1e-6)
        assert np.abs(together[:5] - together[5:10]).max() < 1e-3, "the same texts"
        assert np.abs(together[0] - together[1]).max() > 0.01
        short = llm.embed(texts[0], dimensions=8)[0]
        assert short == pytest.approx(together[0][:8] / np.linalg.norm(together[0][:8]), abs=1e-6)
        with pytest.raises(InvalidRequestError, match=r"generates no text.*embeddings"):
            llm.generate("the cat", SamplingParams(max_tokens=1))
        with pytest.raises(InvalidRequestError, match=r"65 tokens|64 tokens"):
            llm.embed([[5] * 65])


def test_a_text_is_computed_in_one_step(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LlamaCppEncoder(GGUFModel.open(bert), threads=1, n_batch=64, mmap=True, mlock=False) as backend:
        asked = Pooling("cls")
        with pytest.raises(BackendError, match="one step"):
            step_of(backend, [Chunk(array("i", [5]), 1, 0, asks=asked)])
        with pytest.raises(BackendError, match="generates no text"):
            step_of(backend, [Chunk(array("i", [5]), 0, 1)])
        with pytest.raises(BackendError, match="generates no text"):
            rows_of(backend, [Chunk(array("i", [5]), 0, 1)])
        before = step_of(backend, [Chunk(array("i", [5, 6]), 0, 0, asks=asked)]).read[0]
        backend.rebuild()
        assert np.array_equal(step_of(backend, [Chunk(array("i", [5, 6]), 0, 0, asks=asked)]).read[0], before)
        monkeypatch.setattr(backend._library, "package", "another")
        assert backend.describe().startswith("llama.cpp (another ") and "embeds texts" in backend.describe()


@pytest.fixture
async def client(bert: Path) -> AsyncIterator[httpx.AsyncClient]:
    async for opened in served(bert):
        yield opened


async def served(path: Path) -> AsyncIterator[httpx.AsyncClient]:
    config = load_config(overrides={"model.name": str(path), **SETTINGS}).config
    async with AsyncLLM(config) as llm:
        transport = httpx.ASGITransport(create_app(llm, config))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as opened:
            yield opened


async def test_what_an_embedding_model_does_over_http(client: httpx.AsyncClient) -> None:
    reply = await client.post("/v1/embeddings", json={"input": ["the cat", "a dog sat"]})
    assert reply.status_code == 200 and len(reply.json()["data"]) == 2
    assert reply.json()["usage"] == {"prompt_tokens": 9, "total_tokens": 9}
    for path, body in (
        ("/v1/completions", {"prompt": "the cat"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the cat"}]}),
        ("/generate", {"prompt": "the cat"}),
        ("/v1/rerank", {"query": "who?", "documents": ["the cat"]}),
    ):
        reply = await client.post(path, json=body)
        assert reply.status_code == 400, path
        assert ("generates no text" if "rerank" not in path else "cannot rank documents") in reply.text


def ranking(reply: httpx.Response) -> list[tuple[int, float]]:
    """As far as it does not depend on which documents were computed together."""
    return [(result["index"], round(result["relevance_score"], 5)) for result in reply.json()["results"]]


async def test_documents_are_ranked(ranker: Path) -> None:
    documents = ["the cat sat on the mat", "a dog", "what is a mat?", "the cat sat on the mat"]
    async for client in served(ranker):
        body = {"query": "who sat?", "documents": documents}
        reply = await client.post("/v1/rerank", json=body)
        assert reply.status_code == 200
        results = reply.json()["results"]
        scores = [result["relevance_score"] for result in results]
        assert sorted(result["index"] for result in results) == [0, 1, 2, 3] and scores == sorted(scores, reverse=True)
        assert all(0.0 < score < 1.0 for score in scores) and len({round(score, 4) for score in scores}) == 3
        assert results[0]["document"]["text"] == documents[results[0]["index"]]
        short = await client.post("/rerank", json={**body, "top_n": 2, "return_documents": False})
        assert ranking(short) == ranking(reply)[:2] and "document" not in short.json()["results"][0]
        parts = await client.post("/v1/rerank", json={**body, "documents": [{"text": text} for text in documents]})
        assert ranking(parts) == ranking(reply)
        refused = await client.post("/v1/embeddings", json={"input": "the cat"})
        assert refused.status_code == 400 and "use /v1/rerank" in refused.text
        texts = {"query": "who sat?", "texts": documents}
        told = (await client.post("/rerank", json={**texts, "return_text": True})).json()
        assert [(each["index"], round(each["score"], 5)) for each in told] == ranking(reply)
        assert all(each["text"] == documents[each["index"]] for each in told)
        first = (await client.post("/rerank", json={**texts, "top_n": 1})).json()
        assert [*first[0]] == ["index", "score"] and first[0]["index"] == told[0]["index"] and len(first) == 1
        for wrong in ({"texts": documents}, {"documents": None}, {"return_text": True}):
            assert (await client.post("/v1/rerank", json={**body, **wrong})).status_code == 400
        for wrong, name in (({"documents": []}, "documents"), ({"top_n": 0}, "top_n"), ({"query": 3}, "query")):
            reply = await client.post("/v1/rerank", json={**body, **wrong})
            assert reply.status_code == 400 and reply.json()["error"]["param"] == name
        reply = await client.post("/v1/rerank", json={**body, "documents": ["the cat " * 50]})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "documents"


def test_a_pair_is_what_a_cross_encoder_reads(ranker: Path) -> None:
    parts = load_parts(load_config(overrides={"model.name": str(ranker), **SETTINGS}).config)
    try:
        assert parts.text.embedder.pairs is not None
        cat, dog = TOKENS.index("\u2581cat"), TOKENS.index("\u2581dog")
        assert parts.text.embedder.encode_pair("cat", "dog") == [CLS, cat, SEP, dog, SEP]
    finally:
        parts.close()


def test_a_template_of_the_file_makes_pairs(tmp_path: Path) -> None:
    from cllm.text.rerank import load_pair_encoder
    from cllm.text.tokenizer import load_tokenizer

    template = "<|im_end|>q {query} d {document}<|endoftext|>"
    tiny = build_model().with_metadata(tokenizer__chat_template__rerank=template, pooling_type=4)
    model = GGUFModel.open(tiny.write(tmp_path / "reranker.gguf"))
    tokenizer = load_tokenizer(model)
    ids = load_pair_encoder(model, tokenizer)("<|im_end|>", "x")
    assert ids[0] == 1 and ids[-1] == 0 and 1 not in ids[1:]
    assert tokenizer.decode(ids, skip_special=False) == "<|im_end|>q <|im_end|> d x<|endoftext|>"
    assert model.ranks
