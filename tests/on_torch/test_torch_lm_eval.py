"""lm-eval: its `local-completions` on this server gives the scores that it computes with transformers itself."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from cllm.config import load_config
from cllm.llm import AsyncLLM
from http_kit import served
from torch_kit import build, save_whole

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}
lm_eval = pytest.importorskip("lm_eval")
tasks_of_lm_eval = pytest.importorskip("lm_eval.tasks")

CONTEXT = 1024
PREFIX = 1
"""The token before a text. lm-eval would take BOS, and where that is token 0, as here, with a server another one."""
SETTINGS = {
    "backend.type": "torch",
    "backend.torch.device": "cpu",
    "backend.threads": 1,
    "resources.kv_type_k": "f32",
    "resources.kv_type_v": "f32",
    "resources.kv_cache_max_memory_mb": 8,
}
CHOICES = ["its rain", "a tower of iron", "nothing", "its two rivers"]
QUESTIONS = [
    {"question": f"What is {place} known for?", "choices": CHOICES}
    for place in ("Paris", "Rome", "a town that nobody has heard of, far up in the north,", "it")
]
TEXTS = [{"text": "Water runs down the hill, and nobody has ever asked it why. " * times} for times in (1, 3)]


def task(name: str, rows: list[Any], directory: Path, **options: Any) -> dict[str, Any]:
    file = directory / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = {"data_files": {"test": str(file)}, "cache_dir": str(directory)}
    return {"task": name, "dataset_path": "json", "dataset_kwargs": data, "test_split": "test", **options}


def evaluate(tasks: list[Any], kind: str, **arguments: Any) -> Any:
    only_these = tasks_of_lm_eval.TaskManager(include_defaults=False)  # reading all of its own takes ten seconds
    return lm_eval.simple_evaluate(
        model=kind,
        model_args={"max_length": CONTEXT, **arguments},
        tasks=tasks,
        task_manager=only_these,
        batch_size=4,
        bootstrap_iters=0,
    )


async def test_the_scores_are_those_of_transformers(tmp_path: Path) -> None:
    directory = save_whole(build("llama", max_position_embeddings=CONTEXT), tmp_path / "tiny-llama")
    tasks = [
        task("choices", QUESTIONS, tmp_path, output_type="multiple_choice", doc_to_text="{{question}}",
             doc_to_choice="choices", doc_to_target=0),
        task("texts", TEXTS, tmp_path, output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}"),
    ]  # fmt: skip
    config = load_config(None, {"model.name": str(directory), **SETTINGS}, {}).config
    async with AsyncLLM(config) as llm, served(llm) as app:
        found = await asyncio.to_thread(
            evaluate, tasks, "local-completions", model="tiny-llama", base_url=f"{app.url}/v1/completions",
            tokenizer=str(directory), custom_prefix_token_id=PREFIX, num_concurrent=2,
        )  # fmt: skip
    expected = evaluate(tasks, "hf", pretrained=str(directory), prefix_token_id=PREFIX, dtype="float32", device="cpu")
    for name in ("choices", "texts"):
        scores, references = scores_of(found, name), scores_of(expected, name)
        assert len(scores) == (16 if name == "choices" else 2) and max(scores) - min(scores) > 10
        assert scores == pytest.approx(references, abs=1e-3)
    assert found["results"]["choices"]["acc,none"] == expected["results"]["choices"]["acc,none"]


def scores_of(evaluated: Any, name: str) -> list[float]:
    """Log likelihoods, in the order of the documents."""
    answers = [answer for sample in evaluated["samples"][name] for answer in sample["filtered_resps"]]
    return [answer[0] if isinstance(answer, tuple) else answer for answer in answers]
