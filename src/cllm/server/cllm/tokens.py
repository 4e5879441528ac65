"""Tokenize, detokenize, render a chat's prompt, and describe the tokenizer.

The formats are vLLM's; llama-server's parameters (`content`, `with_pieces`) work, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from cllm import __version__
from cllm.engine.params import SamplingParams
from cllm.errors import InvalidRequestError
from cllm.server.http.response import SlicedJsonResponse, as_json, list_pieces, text_pieces
from cllm.server.inference.chat import ChatInput, open_chat, tokens_of_chat
from cllm.server.openai.routes import chat_input_of
from cllm.server.openai.schema import ChatRequest
from cllm.server.responses.replies import InputTokensReply
from cllm.server.schema.body import JsonBody
from cllm.server.schema.messages import Messages
from cllm.server.schema.replies import ErrorReply, error_responses
from cllm.server.schema.tools import Tools
from cllm.server.schema.validation import AtMost, ModelName, RequestModel, Text, TokenIds, Unsupported, refusal
from cllm.server.state import ModelState, ServerState, State
from cllm.text.tokenizer import TokenLimit

if TYPE_CHECKING:
    from cllm.text.tokenizer import Tokenizer

router = APIRouter(tags=["Tokens"])

_ERRORS = error_responses(ErrorReply, 400, 401, 404, 413, 500, 503)


_SOURCES = ("prompt", "content", "messages")


_OF_CHATS: dict[str, dict[str, Any]] = {
    "tools": {"maxItems": 0},
    "chat_template_kwargs": {"maxProperties": 0},
    "continue_final_message": {"enum": [None, False]},
}
"""Parameters that only `messages` can have, and their values without effect, as a schema."""


def _alone(name: str) -> dict[str, Any]:
    """For the API's description: this one is given, and no other."""
    others: dict[str, Any] = {other: {"type": "null"} for other in _SOURCES if other != name}
    if name != "messages":
        others |= _OF_CHATS
    return {"required": [name], "properties": {**others, name: {"not": {"type": "null"}}}}


class TokenizeRequest(RequestModel):
    model_config = ConfigDict(
        json_schema_extra={"example": {"prompt": "Hello, world"}, "oneOf": [_alone(name) for name in _SOURCES]}
    )

    unsupported: ClassVar[Unsupported] = {"chat_template": (), "media_io_kwargs": (), "mm_processor_kwargs": ()}

    model: ModelName | None = Field(None, description="A name from GET /v1/models. Default: the one served.")
    prompt: Text | None = Field(None, description="A text as POST /v1/completions takes it: special tokens by name.")
    content: Text | None = Field(None, description="The same in llama-server's words, without BOS.")
    messages: Messages | None = Field(None, description="A chat as POST /v1/chat/completions takes it.")
    add_special_tokens: bool | None = Field(
        None, description="Begin `prompt` with BOS, if the model does. Default true."
    )
    add_special: bool | None = Field(None, description="The same for `content`. Default false.")
    parse_special: bool | None = Field(None, description="Read names of special tokens in `content`. Default true.")
    add_generation_prompt: bool | None = Field(
        None, description="End `messages` so that the model answers. Default true."
    )
    continue_final_message: bool | None = Field(
        None, description="End `messages` within the last one, so that the model continues it."
    )
    tools: Tools | None = Field(None, description="Tools that go with `messages`.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Arguments for the chat template, with `messages`."
    )
    return_token_strs: bool | None = Field(None, description="Also give each token's text.")
    with_pieces: bool | None = Field(None, description="Give tokens as objects with `id` and `piece`.")

    def contradictions(self) -> Iterator[PydanticCustomError]:
        given = [name for name in _SOURCES if getattr(self, name) is not None]
        if not given:
            yield refusal("prompt", "is missing: send one of prompt, content and messages")
        if len(given) > 1:
            yield refusal(given[1], f"is not allowed together with {given[0]}")
        for name in _OF_CHATS:
            if getattr(self, name) and self.messages is None:
                yield refusal(name, "is only allowed together with messages")
        if self.continue_final_message and self.add_generation_prompt:
            yield refusal("add_generation_prompt", "must be false where continue_final_message is true")


class TokenPiece(BaseModel):
    id: int
    piece: str | list[int] = Field(description="Its text; its bytes where they are only a part of a character.")


class TokenizeReply(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int] | list[TokenPiece]
    token_strs: list[str] | None


class DetokenizeRequest(RequestModel):
    model_config = ConfigDict(json_schema_extra={"example": {"tokens": [1, 2]}})

    model: ModelName | None = Field(None, description="A name from GET /v1/models. Default: the one served.")
    tokens: Annotated[TokenIds, AtMost("max_encode_tokens", "tokens")]


class DetokenizeReply(BaseModel):
    prompt: str
    content: str = Field(description="The same, where llama-server's clients look for it.")


class RenderReply(BaseModel):
    prompt: str
    prompt_token_ids: list[int]


class TokenizerInfo(BaseModel):
    model_config = ConfigDict(protected_namespaces=())

    tokenizer_class: str
    model_max_length: int
    vocab_size: int
    add_bos_token: bool
    bos_token: str | None
    eos_token: str | None
    eos_token_ids: list[int] = Field(description="Every token that ends an answer.")
    chat_template: str
    added_tokens_decoder: dict[str, dict[str, Any]] = Field(description="Special tokens, by id.")


class Version(BaseModel):
    version: str


@router.post("/tokenize", response_model=TokenizeReply, responses=_ERRORS)
async def tokenize(body: JsonBody[TokenizeRequest], request: Request, state: State) -> Response:
    """The tokens of a text or a chat."""
    model = await state.model(body.model, request)
    tokens = await _tokens_of(body, request, state, model)
    return SlicedJsonResponse(_tokenize_pieces(body, tokens, model.llm.text.tokenizer, model.llm.text.max_context))


@router.post("/detokenize", response_model=DetokenizeReply, responses=_ERRORS)
async def detokenize(body: JsonBody[DetokenizeRequest], request: Request, state: State) -> Response:
    """The text of tokens, with special tokens by name."""
    model = await state.model(body.model, request)
    size = model.llm.text.spec.n_vocab
    unknown = next((token for token in body.tokens if token >= size), None)
    if unknown is not None:
        raise InvalidRequestError(f"tokens contains {unknown}; ids go from 0 to {size - 1}", "tokens")
    text = await model.encoder.decode(body.tokens)
    return SlicedJsonResponse(('{"prompt":', *text_pieces(text), ',"content":', *text_pieces(text), "}"))


async def render(body: JsonBody[ChatRequest], request: Request, state: State) -> Response:
    """The prompt of a chat: its text, with special tokens by name, and its tokens. Nothing is computed."""
    chat = await open_chat(state, request, chat_input_of(body), "render-")
    text = await chat.model.encoder.decode(chat.prompt)
    ids = list_pieces(map(str, chat.prompt), entries=4096)
    return SlicedJsonResponse(('{"prompt":', *text_pieces(text), ',"prompt_token_ids":', *ids, "}"))


for path in ("/apply-template", "/v1/chat/completions/render"):
    router.add_api_route(path, render, methods=["POST"], response_model=RenderReply, responses=_ERRORS)


@router.post("/v1/chat/completions/input_tokens", responses=_ERRORS)
async def count_chat(body: JsonBody[ChatRequest], request: Request, state: State) -> InputTokensReply:
    """Count the prompt tokens of a chat request. Nothing is generated."""
    return InputTokensReply(input_tokens=len(await tokens_of_chat(state, request, chat_input_of(body))))


@router.get("/tokenizer_info", responses=error_responses(ErrorReply, 401, 404, 409))
async def tokenizer_info(state: State, model: str | None = None) -> TokenizerInfo:
    """The tokenizer's properties, as in a Hugging Face tokenizer_config.json."""
    shown = state.loaded(model)
    tokenizer, template = shown.llm.text.tokenizer, shown.llm.text.chat_template
    return TokenizerInfo(
        tokenizer_class="PreTrainedTokenizerFast",
        model_max_length=shown.llm.text.max_context,
        vocab_size=tokenizer.vocab_size,
        add_bos_token=tokenizer.add_bos,
        bos_token=template.bos or None,
        eos_token=template.eos or None,
        eos_token_ids=sorted(tokenizer.eos_ids),
        chat_template=template.source,
        added_tokens_decoder={
            str(token_id): {"content": name, "special": True} for name, token_id in tokenizer.special_tokens.items()
        },
    )


@router.get("/version", responses=error_responses(ErrorReply, 401))
async def version() -> Version:
    """The server's version."""
    return Version(version=__version__)


async def _tokens_of(body: TokenizeRequest, request: Request, state: ServerState, model: ModelState) -> Sequence[int]:
    if body.messages is not None:
        call = ChatInput(
            [message.plain() for message in body.messages],
            SamplingParams(),
            tools=[tool.tool() for tool in body.tools or ()],
            template_arguments=body.chat_template_kwargs or {},
            continue_last=bool(body.continue_final_message),
            asks=body.add_generation_prompt is not False,
            model=body.model,
        )
        return await tokens_of_chat(state, request, call)
    most = state.config.server.max_encode_tokens
    limit = TokenLimit(most, f"at most {most} are counted (server.max_encode_tokens)", "the text")
    if body.content is not None:
        special = body.parse_special is not False
        return await model.encoder.encode(
            body.content, limit, "content", special=special, add_bos=body.add_special is True
        )
    assert body.prompt is not None
    if body.add_special_tokens is False:
        return await model.encoder.encode(body.prompt, limit, "prompt", special=True, add_bos=False)
    return await model.encoder.encode_prompt(body.prompt, limit=limit)


def _tokenize_pieces(
    body: TokenizeRequest, tokens: Sequence[int], tokenizer: Tokenizer, max_context: int
) -> Iterator[str]:
    """A `TokenizeReply`."""
    yield f'{{"count":{len(tokens)},"max_model_len":{max_context},"tokens":'
    if body.with_pieces:
        yield from list_pieces(f'{{"id":{token},"piece":{as_json(_piece(tokenizer, token))}}}' for token in tokens)
    else:
        yield from list_pieces(map(str, tokens), entries=4096)
    yield ',"token_strs":'
    if body.return_token_strs:
        yield from list_pieces(json.dumps(tokenizer.token_text(token)) for token in tokens)
    else:
        yield "null"
    yield "}"


def _piece(tokenizer: Tokenizer, token: int) -> str | list[int]:
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode() or tokenizer.token_text(token)
    except UnicodeDecodeError:
        return list(raw)
