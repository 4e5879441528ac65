"""Requests of Ollama's API."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from cllm.dialect.tools import Tool
from cllm.engine.params import MAX_LOGPROBS, SamplingParams
from cllm.server.http.response import as_json
from cllm.server.ollama.messages import conversation_of
from cllm.server.schema.sampling import Stop, in_range
from cllm.server.schema.tools import JsonObject, Tools, allowed_of, check_tools
from cllm.server.schema.validation import (
    A_STRING_OR_STRINGS,
    WHOLE,
    AtMost,
    Int32,
    Int64,
    ModelName,
    MustBe,
    RequestModel,
    Text,
    Texts,
    Unsupported,
    refusal,
)
from cllm.structured.structure import Structure

_TO_PARAMS = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "seed")
_LATEST = ":latest"
_FORMAT = MustBe("'json' or a JSON schema, which is an object")
_THINK = MustBe("true, false, 'low', 'medium', 'high' or 'max'")


class Options(RequestModel):
    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"properties": {"repeat_last_n": {"enum": [None, -1]}}},
                {"properties": {"repeat_penalty": {"enum": [None, 1]}}},
            ]
        }
    )
    hints = frozenset({
        "embedding_only", "f16_kv", "logits_all", "low_vram", "main_gpu", "mirostat_eta", "mirostat_tau", "num_batch",
        "num_ctx", "num_gpu", "num_keep", "num_thread", "numa", "use_mlock", "use_mmap", "vocab_only",
    })  # fmt: skip
    unsupported: ClassVar[Unsupported] = {
        "mirostat": (0,),
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
    repeat_last_n: Int32 | None = Field(
        None,
        description="How far back repeat_penalty looks. Only -1, the whole context, which is the default; without "
        "repeat_penalty any value.",
    )
    seed: Int64 | None = None
    stop: Stop | None = Field(None, description="Stop before any of these strings.")

    def contradictions(self) -> Iterator[PydanticCustomError]:
        if self.repeat_last_n not in (None, -1) and self.repeat_penalty not in (None, 1):
            reason = "repeat_penalty looks at the whole context; leave it out or send -1"
            yield refusal("repeat_last_n", f"is {self.repeat_last_n}, but {reason}")


class NamesModel(RequestModel):
    """Every request of Ollama's names its model."""

    model: ModelName = Field(description="A name from GET /api/tags; `:latest` may follow it.")

    @property
    def name(self) -> str:
        return self.model.removesuffix(_LATEST)


class OllamaRequest(NamesModel):
    hints = frozenset({"keep_alive"})
    unsupported: ClassVar[Unsupported] = {"truncate": (False,), "shift": (False,)}

    stream: bool | None = Field(None, description="Stream the answer as lines of JSON. Default true.")
    options: Options | None = None
    format: Annotated[Literal["", "json"] | JsonObject, _FORMAT] | None = Field(
        None, description='`"json"`: the answer is a JSON object; or the schema that it follows.'
    )
    think: Annotated[bool | Literal["low", "medium", "high", "max"], _THINK] | None = Field(
        None, description="Whether the model reasons, if it can, and how much. Its reasoning is returned as `thinking`."
    )
    logprobs: bool | None = Field(None, description="Return the log probability of every token.")
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = Field(
        None, description="Also report this many of the likeliest tokens."
    )

    def contradictions(self) -> Iterator[PydanticCustomError]:
        _ = self.structure  # here, because bodies are validated where that does not block others
        if self.top_logprobs and not self.logprobs:
            yield refusal("top_logprobs", "is only allowed together with logprobs = true")

    @cached_property
    def structure(self) -> Structure | None:
        if isinstance(self.format, dict):
            return Structure("json_schema", as_json(self.format), "format")
        return Structure("json", "", "format") if self.format else None

    @property
    def template_arguments(self) -> dict[str, Any]:
        if self.think is None:
            return {}
        level = {"reasoning_effort": self.think} if isinstance(self.think, str) else {}
        return {"enable_thinking": bool(self.think), **level}

    def sampling(self) -> SamplingParams:
        options = self.options or Options.model_validate({})
        given: dict[str, Any] = {name: value for name in _TO_PARAMS if (value := getattr(options, name)) is not None}
        if options.repeat_penalty is not None:
            given["repetition_penalty"] = options.repeat_penalty
        if self.logprobs:
            given["logprobs"] = self.top_logprobs or 0
        most = options.num_predict
        stop = options.stop
        return SamplingParams.with_model_defaults(
            **given,
            structured=self.structure,
            max_tokens=None if most is None or most < 0 else most,
            stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        )


class _CalledFunction(RequestModel):
    hints = frozenset({"index"})

    name: Annotated[Text, Field(max_length=256)]
    arguments: JsonObject = Field(default_factory=dict)


class OllamaCall(RequestModel):
    hints = frozenset({"type"})

    function: _CalledFunction
    id: Annotated[Text, Field(max_length=256)] | None = None


class OllamaMessage(RequestModel):
    hints = frozenset({"name"})
    unsupported: ClassVar[Unsupported] = {"images": ([],)}

    role: Literal["system", "user", "assistant", "tool"]
    content: Text | None = Field(None, description="Default: empty.")
    thinking: Text | None = Field(None, description="The assistant's reasoning, for templates that keep it.")
    tool_calls: Annotated[list[OllamaCall], Field(fail_fast=True)] | None = Field(
        None, description="Tool calls of the assistant."
    )
    tool_name: Annotated[Text, Field(max_length=256)] | None = Field(
        None, description="The tool whose result a message of the role `tool` is: of its first call without a result."
    )
    tool_call_id: Annotated[Text, Field(max_length=256)] | None = Field(
        None, description="The call whose result it is. Without it and tool_name: the first one without a result."
    )

    @model_validator(mode="after")
    def _fits_its_role(self) -> OllamaMessage:
        for name, role in (
            ("tool_calls", "assistant"),
            ("thinking", "assistant"),
            ("tool_name", "tool"),
            ("tool_call_id", "tool"),
        ):
            if getattr(self, name) and self.role != role:
                raise refusal(name, f"is only allowed in messages of the role {role!r}")
        return self


class OllamaChatRequest(OllamaRequest):
    model_config = ConfigDict(
        json_schema_extra={"example": {"model": "smollm2", "messages": [{"role": "user", "content": "Name a river."}]}}
    )

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True), AtMost("max_messages", "messages")] | None = Field(
        None,
        description="Empty: only load the model. If the last one is the assistant's, without tool calls, the answer "
        "continues it.",
    )
    tools: Tools | None = Field(None, description="Tools that the model may call.")

    @model_validator(mode="after")
    def _consistent(self) -> OllamaChatRequest:
        check_tools(self.tools, None)
        # Here, because bodies are validated where that does not block others.
        _ = self.chat_tools, self.conversation
        return self

    @cached_property
    def chat_tools(self) -> list[Tool]:
        return allowed_of(self.tools, None)

    @cached_property
    def conversation(self) -> list[dict[str, Any]]:
        return conversation_of(self.messages or ())

    @property
    def continues(self) -> bool:
        """Whether the answer continues the last message."""
        last = self.conversation[-1]
        return last["role"] == "assistant" and "tool_calls" not in last


class OllamaGenerateRequest(OllamaRequest):
    model_config = ConfigDict(json_schema_extra={"example": {"model": "smollm2", "prompt": "Name a river."}})
    unsupported: ClassVar[Unsupported] = {
        **OllamaRequest.unsupported,
        **dict.fromkeys(("images", "context"), ([],)),
        **dict.fromkeys(("width", "height", "steps"), ()),
        "template": ("",),
    }

    prompt: Text | None = Field(None, description="Empty: only load the model.")
    suffix: Text | None = Field(
        None, description="Generate what comes between the prompt and this text, if the model has tokens for that."
    )
    system: Text | None = Field(None, description="A system prompt.")
    raw: bool | None = Field(None, description="Continue the prompt as it is, without the chat template.")

    def contradictions(self) -> Iterator[PydanticCustomError]:
        yield from super().contradictions()
        without_template = "raw = true" if self.raw else "suffix" if self.suffix else None
        for name in ("system", "think"):
            if without_template is not None and getattr(self, name):
                yield refusal(name, f"is not allowed together with {without_template}")


class OllamaEmbedRequest(NamesModel):
    model_config = ConfigDict(json_schema_extra={"example": {"model": "smollm2", "input": ["the cat", "the dog"]}})
    hints = frozenset({"keep_alive", "options"})

    input: Annotated[Text | Annotated[Texts, AtMost("max_inputs", "texts")], A_STRING_OR_STRINGS] | None = Field(
        None, description="A text or several. Empty: only load the model."
    )
    truncate: bool | None = Field(
        None, description="Cut texts that are longer than the context; false: refuse them. Default true."
    )
    dimensions: Annotated[int, Field(ge=1, lt=2**31), WHOLE] | None = Field(
        None, description="Keep only this many of the first dimensions, renormalised."
    )

    @property
    def texts(self) -> list[str]:
        if isinstance(self.input, str):
            return [self.input] if self.input else []
        return self.input or []


class OllamaEmbeddingsRequest(NamesModel):
    model_config = ConfigDict(json_schema_extra={"example": {"model": "smollm2", "prompt": "the cat"}})
    hints = frozenset({"keep_alive", "options"})

    prompt: Text | None = Field(None, description="A text. Empty: only load the model.")


def _needs(name: str) -> dict[str, Any]:
    """For the API's description."""
    return {"required": [name], "properties": {name: {"type": "string", "minLength": 1}}}


class _AboutModel(RequestModel):
    model_config = ConfigDict(
        json_schema_extra={"example": {"model": "smollm2"}, "anyOf": [_needs("model"), _needs("name")]}
    )

    model: ModelName | None = None
    name: ModelName | None = Field(None, description="The old name of model.")

    @model_validator(mode="after")
    def _names_a_model(self) -> _AboutModel:
        if not (self.model or self.name):
            raise refusal("model", "is missing")
        return self

    @property
    def shown(self) -> str:
        return (self.model or self.name or "").removesuffix(_LATEST)


class ShowRequest(_AboutModel):
    hints = frozenset({"options", "system", "template", "verbose"})


class PullRequest(_AboutModel):
    hints = frozenset({"insecure", "password", "username"})

    stream: bool | None = Field(None, description="Answer in lines of JSON. Default true.")
