"""Requests of Ollama's API."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from cllm.engine.params import SamplingParams
from cllm.server.http.response import as_json
from cllm.server.schema.sampling import StopString, StopStrings, in_range
from cllm.server.schema.tools import JsonObject
from cllm.server.schema.validation import WHOLE, AtMost, Int32, Int64, ModelName, RequestModel, Text, Unsupported
from cllm.structured.structure import Structure

_TO_PARAMS = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "seed")


class Options(RequestModel):
    hints: ClassVar[frozenset[str]] = frozenset({
        "f16_kv", "low_vram", "main_gpu", "num_batch", "num_ctx", "num_gpu", "num_keep", "num_thread", "numa",
        "repeat_last_n", "use_mlock", "use_mmap", "vocab_only",
    })  # fmt: skip
    unsupported: ClassVar[Unsupported] = {
        "mirostat": (0,),
        "mirostat_eta": (),
        "mirostat_tau": (),
        "penalize_newline": (),
        "tfs_z": (1, 1.0),
        "typical_p": (1, 1.0),
    }

    num_predict: Annotated[int, Field(ge=-2, lt=2**31), WHOLE] | None = Field(
        None,
        description="Maximum number of tokens to generate; -1 or -2: as many as fit the context, which is the default.",
    )
    temperature: Annotated[float, in_range("temperature")] | None = None
    top_p: Annotated[float, in_range("top_p")] | None = None
    top_k: Annotated[Int32, in_range("top_k")] | None = None
    min_p: Annotated[float, in_range("min_p")] | None = None
    presence_penalty: Annotated[float, in_range("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, in_range("frequency_penalty")] | None = None
    repeat_penalty: Annotated[float, in_range("repetition_penalty")] | None = None
    seed: Int64 | None = None
    stop: StopString | StopStrings | None = Field(None, description="Stop before any of these strings.")


class OllamaRequest(RequestModel):
    hints: ClassVar[frozenset[str]] = frozenset({"keep_alive"})
    unsupported: ClassVar[Unsupported] = {
        "think": (False,),
        "logprobs": (False,),
        "top_logprobs": (0,),
    }

    model: ModelName = Field(description="A name from GET /api/tags; `:latest` may follow it.")
    stream: bool | None = Field(None, description="Stream the answer as lines of JSON. Default true.")
    options: Options | None = None
    format: Literal["", "json"] | JsonObject | None = Field(
        None, description='`"json"`: the answer is a JSON object; or the schema that it follows.'
    )

    @property
    def structure(self) -> Structure | None:
        if isinstance(self.format, dict):
            return Structure("json_schema", as_json(self.format), "format")
        return Structure("json", "", "format") if self.format else None

    @property
    def name(self) -> str:
        return self.model.removesuffix(":latest")

    def sampling(self) -> SamplingParams:
        options = self.options or Options.model_validate({})
        given: dict[str, Any] = {name: value for name in _TO_PARAMS if (value := getattr(options, name)) is not None}
        if options.repeat_penalty is not None:
            given["repetition_penalty"] = options.repeat_penalty
        most = options.num_predict
        stop = options.stop
        return SamplingParams.with_model_defaults(
            **given,
            structured=self.structure,
            max_tokens=None if most is None or most < 0 else most,
            stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        )


class OllamaMessage(RequestModel):
    unsupported: ClassVar[Unsupported] = {"images": ([],), "tool_calls": ([],), "tool_name": (), "thinking": ("",)}

    role: Literal["system", "user", "assistant"]
    content: Text


class OllamaChatRequest(OllamaRequest):
    model_config = ConfigDict(
        json_schema_extra={"example": {"model": "smollm2", "messages": [{"role": "user", "content": "Name a river."}]}}
    )
    unsupported: ClassVar[Unsupported] = {**OllamaRequest.unsupported, "tools": ([],)}

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True, min_length=1), AtMost("max_messages", "messages")]


class OllamaGenerateRequest(OllamaRequest):
    model_config = ConfigDict(json_schema_extra={"example": {"model": "smollm2", "prompt": "Name a river."}})
    unsupported: ClassVar[Unsupported] = {
        **OllamaRequest.unsupported,
        "suffix": ("",),
        "images": ([],),
        "template": ("",),
        "context": ([],),
    }

    prompt: Text | None = Field(None, description="Empty: only load the model.")
    system: Text | None = Field(None, description="A system prompt.")
    raw: bool | None = Field(None, description="Continue the prompt as it is, without the chat template.")


class ShowRequest(RequestModel):
    model_config = ConfigDict(json_schema_extra={"example": {"model": "smollm2"}})
    hints: ClassVar[frozenset[str]] = frozenset({"verbose"})

    model: ModelName

    @property
    def name(self) -> str:
        return self.model.removesuffix(":latest")
