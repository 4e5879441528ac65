"""`/generate`, `/encode`, `/benchmark` and `/model/info`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from cllm.engine.submission import Submission
from cllm.generation import Completion
from cllm.server.cllm.benchmark import run_benchmark
from cllm.server.cllm.generate_schema import (
    DEFAULT_MAX_TOKENS,
    BenchmarkReply,
    BenchmarkRequest,
    EncodeReply,
    EncodeRequest,
    FailureReply,
    GenerateData,
    GenerateReply,
    GenerateRequest,
    ModelInfo,
    ModelInfoReply,
)
from cllm.server.errors import ApiError
from cllm.server.http.response import (
    DONE,
    EventStream,
    PromptProgress,
    SlicedJsonResponse,
    TokenCounts,
    data,
    list_pieces,
    unless_gone,
)
from cllm.server.inference.limits import pins_of
from cllm.server.inference.streams import CompletionStream, collect, sent_by
from cllm.server.schema.body import JsonBody
from cllm.server.schema.replies import CacheDetailsReply, error_responses, event_stream, groups_of
from cllm.server.schema.structure import compiled
from cllm.server.state import ServerState, State, tenant_of
from cllm.text.tokenizer import TokenLimit

if TYPE_CHECKING:
    from cllm.dialect.deltas import Delta

_ERRORS = error_responses(FailureReply, 400, 401, 404, 408, 413, 429, 500, 503)
_STREAM = 'data: {"id":"gen-1","token":[318],"text":" is","done":false}'

router = APIRouter(tags=["cLLM"])


class _Run:
    """One prompt and its answer, timed from the request's arrival."""

    def __init__(self, request: Request, max_tokens: int) -> None:
        self.id = f"gen-{request.state.unique_id}"
        self.max_tokens = max_tokens
        self._started = time.perf_counter()

    def summary(self, answer: Completion, answers: TokenCounts) -> GenerateData:
        elapsed, details = time.perf_counter() - self._started, answers.cache_details
        return GenerateData(
            id=self.id,
            text=answer.text,
            response_time=elapsed,
            tokens_per_second=answers.completion_tokens / elapsed,
            generated_tokens=answers.completion_tokens,
            max_tokens=self.max_tokens,
            prompt_tokens=answers.prompt_tokens,
            cached_tokens=answers.cached_tokens,
            cache_details=None if details is None else CacheDetailsReply(**details._asdict()),
            finish_reason=answer.finish_reason,
        )


class _GenerateEvents:
    """Each event has a delta; the last one repeats the whole answer."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._answer = Completion()
        self._start = f'data: {{"id":{json.dumps(run.id)},"token":'

    def event(self, delta: Delta) -> str:
        self._answer.add(delta)
        return f'{self._start}{delta.token_ids},"text":{json.dumps(delta.text)},"done":false}}\n\n'

    def progress(self, progress: PromptProgress) -> str:
        return f'{self._start}[],"text":"","done":false,"prompt_progress":{progress.json()}}}\n\n'

    def end(self, answers: TokenCounts) -> str:
        summary = self._run.summary(self._answer, answers)
        return data({**summary.model_dump(), "done": True}) + DONE


@router.post("/generate", response_model=GenerateReply, responses=_ERRORS)
async def generate(body: JsonBody[GenerateRequest], request: Request, state: State) -> Response:
    """Continue a prompt."""
    run, completions = await _prepare(body, request, state)

    (answer,) = await unless_gone(request.receive, collect(completions, [Completion()]))
    reply = GenerateReply(data=run.summary(answer, completions))
    return Response(reply.model_dump_json(), media_type="application/json")


@router.post("/generate_stream", response_class=Response, responses={**_ERRORS, **event_stream(_STREAM)})
async def generate_stream(body: JsonBody[GenerateRequest], request: Request, state: State) -> Response:
    """Continue a prompt as server-sent events: `token` holds the new token ids, `text` the new text."""
    run, completions = await _prepare(body, request, state)
    events = _GenerateEvents(run)
    return EventStream(completions, events, events.progress if body.return_progress else None)


@router.post(
    "/encode", response_model=EncodeReply, responses=error_responses(FailureReply, 400, 401, 404, 413, 500, 503)
)
async def encode(body: JsonBody[EncodeRequest], request: Request, state: State) -> Response:
    """The tokens of a text."""
    model = await state.model(body.model, request)
    most = state.config.server.max_encode_tokens
    limit = TokenLimit(most, f"at most {most} are counted (server.max_encode_tokens)", "the text")
    return SlicedJsonResponse(_encode_pieces(await model.encoder.encode_prompt(body.text, limit=limit, param="text")))


@router.post("/benchmark", response_model=BenchmarkReply, responses={**_ERRORS, **error_responses(FailureReply, 403)})
async def benchmark(body: JsonBody[BenchmarkRequest], request: Request, state: State) -> Response:
    """Run a small benchmark on this server, one at a time."""
    model = await state.model(body.model, request)
    if state.benchmark_running:
        raise ApiError(
            429,
            "A benchmark is already running.",
            kind="overloaded_error",
            code="benchmark_running",
            headers={"Retry-After": "10"},
        )
    state.benchmark_running = True
    try:
        prompt = await model.encoder.encode_prompt(body.prompt)
        run_id = f"bench-{request.state.unique_id}"
        work = run_benchmark(model.llm, prompt, body, run_id, tenant_of(request))
        measured = await unless_gone(request.receive, work)
    finally:
        state.benchmark_running = False
    return Response(BenchmarkReply(data=measured).model_dump_json(), media_type="application/json")


@router.get("/model/info", responses=error_responses(FailureReply, 401, 404, 409))
async def model_info(state: State, model: str | None = None) -> ModelInfoReply:
    """The model being served, and what a token of it costs."""
    shown = state.loaded(model)
    llm, spec, kv = shown.llm, shown.llm.text.spec, shown.llm.executor.snapshot().kv
    info = ModelInfo(
        name=shown.served_name,
        backend=llm.text.facts.traits.name,
        architecture=spec.architecture,
        layers=spec.n_layers,
        embedding_size=spec.n_embd,
        heads=max((attention.n_heads for attention in spec.attentions), default=0),
        kv_heads=max((attention.n_kv_heads for attention in spec.attentions), default=0),
        vocab_size=spec.n_vocab,
        context_length=llm.text.max_context,
        trained_context_length=spec.context_length,
        kv_layout=kv.layout,
        kv_type_k=shown.config.resources.kv_type_k,
        kv_type_v=shown.config.resources.kv_type_v,
        kv_bytes_per_token=llm.text.facts.bytes_per_token,
        kv_groups=groups_of(llm.text.facts.groups),
        kv_bytes_total=kv.total * kv.bytes_per_unit,
        sampling_defaults=dict(llm.text.sampling_defaults.values),
        sampling_defaults_from=dict(llm.text.sampling_defaults.sources),
    )
    return ModelInfoReply(data=info)


def _encode_pieces(tokens: Sequence[int]) -> Iterator[str]:
    """An `EncodeReply`."""
    yield '{"success":true,"data":{"tokens":'
    yield from list_pieces(map(str, tokens), entries=4096)
    yield f',"length":{len(tokens)}}}}}'


async def _prepare(body: GenerateRequest, request: Request, state: ServerState) -> tuple[_Run, CompletionStream]:
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    run = _Run(request, max_tokens)
    params = body.sampling(max_tokens=max_tokens)
    model = await state.model(body.model, request, body.timeout)
    prompt = await model.encoder.encode_prompt(body.prompt, params)
    pins, grammar = pins_of(model, body.cache_control, prompt), await compiled(model.llm, params)
    asked = Submission(prompt, params, pins=pins, grammar=grammar)
    sent = sent_by(request, model, [asked], run.id, priority=body.priority, timeout=body.timeout)
    return run, CompletionStream(model.llm, sent, cache_details=bool(body.return_cache_details))
