"""Requests of OpenAI's API. Parameters that are not supported are listed, and refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field
from pydantic_core import PydanticCustomError

from cllm.engine.params import MAX_LOGPROBS
from cllm.server.inference.truncation import Truncation
from cllm.server.schema.messages import MOST_MARKS, Messages, check_calls, count_marks, effort_arguments
from cllm.server.schema.sampling import RETURN_PROGRESS, SamplingFields, in_range
from cllm.server.schema.tools import Choice, Tools, check_tools
from cllm.server.schema.validation import (
    END_USER,
    PROMPTS,
    WHOLE,
    AtMost,
    Int32,
    ModelName,
    RequestModel,
    Text,
    Texts,
    Tokens,
    Unsupported,
    UserName,
    Words,
    raised_by,
    refusal,
)

_PROMPT = "A string, several strings, token ids, or several lists of token ids."


class StreamOptions(RequestModel):
    hints = frozenset({"include_obfuscation"})

    include_usage: bool | None = Field(None, description="End the stream with an event that holds the usage.")
    continuous_usage_stats: bool | None = Field(
        None, description="With include_usage: every event holds the usage up to its text."
    )


def _together(name: str, needs: str) -> dict[str, Any]:
    """For the API's description: `name` requires `needs` to be true."""
    given = {"properties": {needs: {"const": True}}, "required": [needs]}
    return {"anyOf": [{"properties": {name: {"type": "null"}}}, given]}


HINTS = frozenset({
    "cache_prompt", "id_slot", "metadata", "prediction", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "request_id", "service_tier", "session_id", "spaces_between_special_tokens", "store",
    # how a stream is cut, and how the server works
    "backend_sampling", "guided_decoding_backend", "n_cache_reuse", "sse_ping_interval", "stream_interval", "verbose",
    # details of what is refused: without it they change nothing
    "adaptive_decay", "dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers",
    "dynatemp_exponent", "mirostat_eta", "mirostat_tau", "xtc_threshold",
})  # fmt: skip
"""Parameters of OpenAI, vLLM and llama-server that do not affect the answer."""

OTHERS: Unsupported = {
    **dict.fromkeys((
        "moderation", "guided_whitespace_pattern", "allowed_token_ids", "repetition_detection", "thinking_token_budget",
        "cache_salt", "kv_transfer_params", "ec_transfer_params", "vllm_xargs", "samplers",
    ), ()),
    **dict.fromkeys((
        "include_stop_str_in_output", "use_beam_search", "grammar_lazy", "return_token_offsets", "timings_per_token",
        "return_tokens", "post_sampling_probs",
    ), (False,)),
    "skip_special_tokens": (True,),
    **dict.fromkeys((
        "bad_words", "grammar_triggers", "preserved_tokens", "stop_regex", "logits_processors", "logprob_token_ids",
        "response_fields", "lora",
    ), ([],)),
    **dict.fromkeys(("n_keep", "n_discard", "n_indent", "n_probs", "min_keep", "mirostat"), (0,)),
    **dict.fromkeys(("dynatemp_range", "xtc_probability", "dry_multiplier"), (0.0, 0)),
    **dict.fromkeys(("n_predict", "reasoning_budget_tokens", "repeat_last_n"), (-1,)),
    **dict.fromkeys(("top_n_sigma", "adaptive_target"), (-1.0, -1)),
    **dict.fromkeys(("typical_p", "repeat_penalty"), (1.0, 1)),
    "length_penalty": (1.0,), "n_cmpl": (1,), "t_max_predict_ms": (0, -1),
}  # fmt: skip
"""Parameters of vLLM, SGLang and llama-server that would change the answer, with the values that do not."""

OTHER_NAMES = {"n_predict": "max_tokens", "n_cmpl": "n", "n_probs": "logprobs", "repeat_penalty": "repetition_penalty"}


class OpenAIRequest(SamplingFields):
    model: ModelName | None = Field(None, description="A name from GET /v1/models. Default: the one served.")
    n: Annotated[Int32, in_range("n")] | None = Field(None, description="Number of answers to each prompt. Default 1.")
    stream: bool | None = Field(None, description="Stream the answer as server-sent events.")
    stream_options: StreamOptions | None = None
    return_progress: bool | None = RETURN_PROGRESS
    user: UserName | None = Field(None, description=END_USER)
    prompt_logprobs: Annotated[Int32, in_range("prompt_logprobs")] | None = Field(
        None, description="Log probabilities of the prompt's tokens, and of this many of the likeliest in their places."
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31), WHOLE] | None = Field(
        None,
        description="Cut prompts to this many tokens; -1: to as many as leave room for max_tokens. Default: refuse "
        "those that are too long.",
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="With truncate_prompt_tokens: left keeps the last tokens, right the first. Default left."
    )
    return_token_ids: bool | None = Field(
        None,
        description="Also return prompt_token_ids, and token_ids: all tokens of the answer, with the one that ends it.",
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Name tokens in logprobs by their ids, as `token_id:42`."
    )

    def contradictions(self) -> Iterator[PydanticCustomError]:
        yield from super().contradictions()
        if self.stream_options is not None and not self.stream:
            yield refusal("stream_options", "is only allowed together with stream = true")

    @property
    def end_user(self) -> str | None:
        return self.user

    @property
    def truncation(self) -> Truncation | None:
        most = self.truncate_prompt_tokens
        return None if most is None else Truncation(most, self.truncation_side or "left")

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionRequest(OpenAIRequest):
    model_config = ConfigDict(
        json_schema_extra={
            "example": {"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0},
            "allOf": [_together("stream_options", "stream")],
        }
    )
    hints = HINTS
    unsupported: ClassVar[Unsupported] = {**OTHERS, "add_special_tokens": (True,), "prompt_embeds": ()}
    instead: ClassVar[Mapping[str, str]] = OTHER_NAMES

    prompt: Annotated[
        Words
        | Annotated[Texts, Field(json_schema_extra={"minItems": 1}), AtMost("max_prompts", "prompts", str)]
        | Tokens
        | Annotated[
            list[Tokens],
            Field(fail_fast=True, json_schema_extra={"minItems": 1}),
            AtMost("max_prompts", "prompts", list),
        ],
        PROMPTS,
    ] = Field(description=_PROMPT)
    max_tokens: Annotated[Int32, in_range("max_tokens")] | None = Field(
        None, description="Maximum number of tokens to generate. Default 16. With 0, only the prompt is computed."
    )
    echo: bool | None = Field(
        None, description="Return the prompt in front of the answer, with its log probabilities if logprobs is set."
    )
    logprobs: Annotated[Int32, in_range("logprobs")] | None = Field(
        None, description="Log probabilities of this many of the likeliest tokens, 0 to 20."
    )
    best_of: Annotated[Int32, in_range("n")] | None = Field(
        None,
        description="Generate this many answers and return the n with the highest mean log probability. Default n.",
    )
    suffix: Text | None = Field(
        None, description="Generate what comes between the prompt and this text, if the model has tokens for that."
    )

    def contradictions(self) -> Iterator[PydanticCustomError]:
        yield from super().contradictions()
        n = self.n or 1
        if self.best_of is not None and self.best_of < n:
            yield refusal("best_of", f"is {self.best_of}, less than n ({n})")
        if self.best_of is not None and self.best_of > n and self.stream:
            yield refusal("best_of", "is not supported with stream = true: which are best is only known at the end")
        if self.suffix and self.echo:
            yield refusal("suffix", "is not allowed together with echo")
        if self.suffix and self.truncate_prompt_tokens is not None:
            yield refusal("truncate_prompt_tokens", "is not allowed together with suffix")


class ChatRequest(OpenAIRequest):
    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "messages": [{"role": "user", "content": "What is the capital of France?"}],
                "max_completion_tokens": 64,
            },
            "allOf": [_together("stream_options", "stream"), _together("top_logprobs", "logprobs")],
        }
    )
    hints = HINTS | {"verbosity"}
    unsupported: ClassVar[Unsupported] = {
        **OTHERS,
        **dict.fromkeys((
            "audio", "web_search_options", "chat_template", "mm_processor_kwargs", "media_io_kwargs",
        ), ()),
        **dict.fromkeys((
            "add_special_tokens", "reasoning_control", "return_prompt_text", "return_assistant_tokens_mask",
        ), (False,)),
        "functions": ([],), "function_call": ("none",), "modalities": (["text"],), "documents": ([],),
        "best_of": (1,), "parse_tool_calls": (True,),
    }  # fmt: skip
    instead: ClassVar[Mapping[str, str]] = {
        **OTHER_NAMES,
        "n_probs": "logprobs = true and top_logprobs",
        "functions": "tools",
        "function_call": "tool_choice",
    }

    messages: Messages = Field(examples=[[{"role": "user", "content": "What is the capital of France?"}]])
    max_tokens: Annotated[Int32, in_range("max_tokens")] | None = Field(
        None, description="The old name of max_completion_tokens."
    )
    max_completion_tokens: Annotated[int, Field(ge=0, lt=2**31), WHOLE] | None = Field(
        None, description="Maximum number of tokens to generate. Default: as many as fit the context."
    )
    logprobs: bool | None = Field(None, description="Return the log probability of every token.")
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = Field(
        None, description="Also report this many of the likeliest tokens."
    )
    safety_identifier: UserName | None = Field(None, description="The new name of user.")
    tools: Tools | None = Field(None, description="Tools that the model may call.")
    tool_choice: Choice | None = Field(
        None,
        description="`auto` (default): the model may call tools; `none`; `required`; or the one that it must call.",
    )
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call. Default true.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Arguments for the chat template.", examples=[{"enable_thinking": False}]
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="For the chat template; none: also enable_thinking = false."
    )
    separate_reasoning: bool | None = Field(
        None, description="Return reasoning as reasoning_content. Default: the server's chat.reasoning."
    )
    include_reasoning: bool | None = Field(None, description="false: leave reasoning_content out. Default true.")
    reasoning_format: Literal["auto", "none", "deepseek"] | None = Field(
        None, description="llama-server's name: none is separate_reasoning = false, deepseek is true."
    )
    continue_final_message: bool | None = Field(
        None, description="Continue the last message, which must be the assistant's, instead of starting a new one."
    )
    add_generation_prompt: bool | None = Field(
        None, description="false: do not end the prompt with the start of an assistant message. Default true."
    )
    echo: bool | None = Field(
        None, description="If the last message is the assistant's, return its text in front of the answer."
    )

    def contradictions(self) -> Iterator[PydanticCustomError]:
        yield from super().contradictions()
        yield from raised_by(lambda: check_tools(self.tools, self.tool_choice))
        yield from raised_by(lambda: check_calls(self.messages))
        if self.continue_final_message and self.add_generation_prompt:
            yield refusal("add_generation_prompt", "must be false where continue_final_message is true")
        if self.separate_reasoning is not None and self.reasoning_format not in (None, "auto"):
            yield refusal("reasoning_format", "says the same as separate_reasoning; send one of them")
        if self.top_logprobs is not None and not self.logprobs:
            yield refusal("top_logprobs", "is only allowed together with logprobs = true")
        names = (self.max_tokens, self.max_completion_tokens)
        if None not in names and names[0] != names[1]:
            yield refusal("max_tokens", f"is {names[0]}, but max_completion_tokens is {names[1]}; send one of them")
        if (count := count_marks(self.messages)) > MOST_MARKS:
            yield refusal("messages", f"has {count} cache_control marks; at most {MOST_MARKS} are allowed")

    @property
    def end_user(self) -> str | None:
        return self.user or self.safety_identifier

    @property
    def echoed(self) -> str:
        """The text in front of the answer."""
        last = self.messages[-1]
        return last.plain()["content"] if self.echo and last.role == "assistant" else ""

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def template_arguments(self) -> dict[str, Any]:
        return {**effort_arguments(self.reasoning_effort), **(self.chat_template_kwargs or {})}

    @property
    def separates_reasoning(self) -> bool | None:
        if self.reasoning_format in (None, "auto"):
            return self.separate_reasoning
        return self.reasoning_format == "deepseek"
