"""The torch engine on a GPU, with random weights of real shapes: how fast is it, and what is fp8 worth?"""

from __future__ import annotations

import random
import string
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from time import perf_counter
from typing import TYPE_CHECKING, Any

from cllm_bench.figures import OURS, Figure, Metrics, Run, own
from cllm_bench.load import at_most
from cllm_bench.measures import totals
from cllm_bench.pages.extras import check_extra
from cllm_bench.workloads.base import LocalWorkload, Setup

if TYPE_CHECKING:
    from cllm_bench.torch_gpu.engines import Bench, Place

TRANSFORMERS = "transformers"


@dataclass(frozen=True)
class Torch(LocalWorkload):
    """Models of the shapes of Llama 3 8B and Llama 3.2 1B, one after the other, then the HTTP server in a process of
    its own, then Hugging Face transformers where it is installed. What must be reached is for an H200."""

    tokens_in: int = 128
    tokens_out: int = 128
    many: int = 256
    users: int = 64
    prompts: int = 8
    prompt_tokens: int = 2048
    attended_tokens: int = 4096
    tiny: bool = False

    name = "torch"
    needs_model = False
    figures = (
        Figure("one_tokens_per_s", "8B bf16, 1 stream", "tok/s", "higher", own(205)),
        Figure("many_tokens_per_s", "8B bf16, many requests at once", "tok/s", "higher", own(12_000)),
        Figure("decode_tokens_per_s", "8B, decode steps of as many rows", "tok/s", "higher", own(23_000)),
        Figure("prefill_tokens_per_s", "prefill 8B", "tok/s", "higher", own(30_000)),
        Figure("times_computed", "users on one long prompt: how often it is computed", "", limit=own(1.02)),
        Figure("shared_share", "its time, over that of different prompts", "x", compared=False),
        Figure("http_tokens_per_s", "8B through HTTP, as many streaming clients", "tok/s", "higher"),
        Figure("http_share", "of the engine's own speed", "x", "higher", own(0.85), compared=False),
        Figure("fp8_one_times", "8B fp8, 1 stream, over bf16", "x", "higher", own(1.4), compared=False),
        Figure("fp8_many_times", "8B fp8, many requests, over bf16", "x", "higher", compared=False),
        Figure("small_one_tokens_per_s", "1B bf16, 1 stream", "tok/s", "higher", own(800)),
        Figure("small_many_tokens_per_s", "1B bf16, many requests at once", "tok/s", "higher"),
        Figure("small_decode_tokens_per_s", "1B, decode steps of as many rows", "tok/s", "higher", own(45_000)),
        Figure("attention_share", "decode attention alone, of the memory's speed", "", "higher", own(0.8)),
    )

    @property
    def title(self) -> str:
        return (
            f"torch: 1 and {self.many} streams, {self.tokens_in} tokens in, {self.tokens_out} out; "
            f"{self.prompts} prompts of {self.prompt_tokens}; {self.users} users of one prompt"
        )

    def quick(self) -> Torch:
        return replace(
            self, tokens_in=16, tokens_out=12, many=8, users=8, prompts=2, prompt_tokens=80, attended_tokens=64,
            tiny=True,
        )  # fmt: skip

    async def one_repeat(self, setup: Setup, repeat: int) -> list[Run]:
        check_extra("torch", f"cllm bench {self.name}", "torch")
        from cllm_bench.torch_gpu.attention import attention_share
        from cllm_bench.torch_gpu.engines import engine, random_models
        from cllm_bench.torch_gpu.server import served

        with random_models(setup, "8B", "1B", tiny=self.tiny) as place:
            async with engine(place.settings_for("8B")) as bench:
                ours = await self._speeds(bench) | await self._prefill(bench) | await self._shared_prompt(bench)
            async with engine(place.settings_for("1B")) as bench:
                ours |= {f"small_{key}": value for key, value in (await self._speeds(bench)).items()}
            if place.on_gpu:
                async with engine(place.settings_for("8B", backend__torch__dtype="fp8")) as bench:
                    fp8 = await self._speeds(bench)
                ours |= {
                    f"fp8_{key}_times": fp8[f"{key}_tokens_per_s"] / ours[f"{key}_tokens_per_s"] for key in _COUNTS
                }
            ours["attention_share"] = attention_share(place, self.users, self.attended_tokens)
            async with served(place, "8B") as client:
                for seed in (0, 1):  # the first time graphs are made
                    draw = random.Random(seed)
                    # A letter is a token of the made-up tokenizer.
                    texts = ("".join(draw.choices(string.ascii_lowercase, k=self.tokens_in)) for _ in range(self.many))
                    jobs = [partial(client.complete, text, self.tokens_out) for text in texts]
                    rate = totals(await at_most(self.many, jobs))["tokens_per_s"]
                client.raise_for_errors()
            ours |= {"http_tokens_per_s": rate, "http_share": rate / ours["many_tokens_per_s"]}
            runs = [Run(OURS, repeat, ours, {"settings": f"on {place.device}"})]
            if find_spec(TRANSFORMERS) is not None:
                runs.append(Run(TRANSFORMERS, repeat, self._transformers(place)))
        return runs

    async def _speeds(self, bench: Bench) -> Metrics:
        return await bench.speeds(self.many, self.tokens_in, self.tokens_out)

    async def _prefill(self, bench: Bench) -> Metrics:
        """Prompts that come together, until each has its first token."""
        for seed in ("warm prefill", "prefill"):
            run = await bench.ask_alike(bench.prompts(self.prompts, self.prompt_tokens, seed), 1)
        return {"prefill_tokens_per_s": self.prompts * self.prompt_tokens / run.seconds}

    async def _shared_prompt(self, bench: Bench) -> Metrics:
        """Users who come at once with a long prompt in common and a short question of their own, against as many with
        different prompts of that length."""
        own, out = 24, 16
        length = self.prompt_tokens + own
        await bench.ask_alike(bench.prompts(self.users, length // 4, "warm shared"), out)
        different = await bench.ask_alike(bench.prompts(self.users, length, "different"), out)
        shared = bench.prompts(1, self.prompt_tokens, "shared")[0]
        questions = bench.prompts(self.users, own, "questions")
        same = await bench.ask_alike([shared + question for question in questions], out)
        computed = sum(step.prompt_tokens for step in bench.log.steps) - self.users * own
        return {"times_computed": computed / self.prompt_tokens, "shared_share": same.seconds / different.seconds}

    def _transformers(self, place: Place) -> Metrics:
        """`generate`, greedy, with scaled dot product attention."""
        import torch
        import transformers

        from cllm_bench.torch_gpu.models import config_of

        found: Metrics = {}
        for shape, prefix in (("8B", ""), ("1B", "small_")):
            config = transformers.LlamaConfig(**config_of(place.shape(shape)))
            with torch.device(place.device):
                model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            for key, rows in zip(_COUNTS, (1, self.many), strict=True):
                prompt = torch.randint(0, config.vocab_size, (rows, self.tokens_in), device=place.device)
                with torch.inference_mode():
                    seconds = min(_generate_s(model.eval(), prompt, self.tokens_out) for _ in range(2))
                found[f"{prefix}{key}_tokens_per_s"] = rows * self.tokens_out / seconds
            del model
        return found


_COUNTS = ("one", "many")


def _generate_s(model: Any, prompt: Any, tokens: int) -> float:
    started = perf_counter()
    answer = model.generate(
        prompt, attention_mask=prompt.new_ones(prompt.shape), max_new_tokens=tokens, min_new_tokens=tokens,
        do_sample=False, pad_token_id=0,
    )  # fmt: skip
    answer.cpu()
    return perf_counter() - started
