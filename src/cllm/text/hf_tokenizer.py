"""The tokenizer of a Hugging Face directory: `tokenizer.json` with the `tokenizers` library, and the chat template.

The library splits ordinary text. Added tokens are cut out before that, so that a special token's name in ordinary text
stays text. The text between them is tokenised as it would be within the whole text: a prefix that belongs only before
the first word (`prepend_scheme: first`) is put only there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Library

from cllm.errors import ModelError
from cllm.machine import can_reserve
from cllm.models.gguf_header import short
from cllm.models.hf_directory import HFModel
from cllm.models.json_file import FETCH_AGAIN, parse_json, read_json, read_text
from cllm.text import bpe, spm
from cllm.text.bpe import Encoder
from cllm.text.template_source import CHATML, TemplateSource, warn_of_chatml
from cllm.text.tokenizer import ROOM_BYTES, ROOM_PER_TOKEN, TableTokenizer, Tokenizer, join_encoded
from cllm.text.vocab import MAX_TOKEN_LENGTH, TokenKind

_MAX_TOKENIZER_BYTES = 128 << 20
_MAX_SETTINGS_BYTES = 16 << 20
_MAX_TEMPLATE_BYTES = 1 << 20
_SETTINGS = "tokenizer_config.json"
_ENDS = "generation_config.json"
_TEMPLATE = "chat_template.jinja"
_TEMPLATE_OBJECT = "chat_template.json"


class HFTokenizer(TableTokenizer):
    """`inner` encodes text that is not at the start of the prompt."""

    def __init__(
        self,
        pieces: Sequence[bytes],
        *,
        encoder: Encoder,
        inner: Encoder,
        swallows: Mapping[int, tuple[bool, bool]],
        **others: Any,
    ) -> None:
        """`swallows`: tokens that remove spaces to their left or right."""
        super().__init__(pieces, encoder=encoder, **others)
        self._inner = inner
        self._swallows = swallows

    def _encode_fragments(self, fragments: Sequence[str | int]) -> list[int]:
        parts = _trimmed(fragments, self._swallows)
        first = 1 if parts and isinstance(parts[0], str) else 0
        return join_encoded(parts[:first], self._encode) + join_encoded(parts[first:], self._inner)


def load_hf_tokenizer(model: HFModel) -> Tokenizer:
    path = model.path / "tokenizer.json"
    text = read_text(path, _MAX_TOKENIZER_BYTES)
    if text is None:
        raise ModelError(f"{path}: is missing; download the model with its tokenizer.json")
    if not can_reserve(ROOM_BYTES + 8 * len(text) + model.spec.n_vocab * ROOM_PER_TOKEN):
        raise ModelError(f"{path}: not enough memory or address space (ulimit -v) for the tokenizer")
    description = parse_json(text, path)
    added = _added_tokens(description, path, model.spec.n_vocab)
    pieces = _read_pieces(description, path, model.spec.n_vocab)
    for token in added:
        pieces[token["id"]] = b"" if token["special"] else token["content"].encode()
    bos_id, adds_bos = _read_bos(description, path)
    settings = _read_settings(model)
    special = {token["content"]: token["id"] for token in added if token["special"]}
    if bos_id is None:
        bos_id = special.get(_token_name(settings, "bos_token"))
    encoder = _encoder(description, path)
    return HFTokenizer(
        pieces,
        encoder=encoder,
        inner=_inner_encoder(description, path) or encoder,
        swallows={t["id"]: (t["lstrip"], t["rstrip"]) for t in added if t["lstrip"] or t["rstrip"]},
        special_tokens=special,
        whole_tokens={token["content"]: token["id"] for token in added if not token["special"]},
        bos_id=bos_id,
        eos_ids=_end_ids(model, special | _vocabulary(description, path), settings),
        add_bos=adds_bos,
    )


def load_hf_chat_template(model: HFModel, source: str | None = None) -> TemplateSource:
    """The template `source`, the directory's own, or ChatML."""
    settings = _read_settings(model)
    template = source or _own_template(model, settings)
    if not template:
        warn_of_chatml(model.path)
        template = CHATML
    return TemplateSource(template, _token_name(settings, "bos_token"), _token_name(settings, "eos_token"))


# -- other files -------------------------------------------------------------------------------------------------


def _read_settings(model: HFModel) -> dict[str, Any]:
    return read_json(model.path / _SETTINGS, _MAX_SETTINGS_BYTES) or {}


def _token_name(settings: Mapping[str, Any], key: str) -> str:
    value = settings.get(key)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _end_ids(model: HFModel, ids: Mapping[str, int], settings: Mapping[str, Any]) -> frozenset[int]:
    """All tokens that end an answer according to any of the files."""
    ends: set[int] = set()
    generation = read_json(model.path / _ENDS, _MAX_SETTINGS_BYTES) or {}
    for source in (generation, model.config):
        value = source.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is None:
                continue
            if type(token_id) is not int or not 0 <= token_id < model.spec.n_vocab:
                raise ModelError(
                    f"{model.path}: its eos_token_id is {short(value)}, not a token of its vocabulary; {FETCH_AGAIN}"
                )
            ends.add(token_id)
    name = _token_name(settings, "eos_token")
    if name in ids:
        ends.add(ids[name])
    return frozenset(ends)


def _own_template(model: HFModel, settings: Mapping[str, Any]) -> str:
    template = read_text(model.path / _TEMPLATE, _MAX_TEMPLATE_BYTES)
    if template is not None:
        return template
    described = read_json(model.path / _TEMPLATE_OBJECT, _MAX_TEMPLATE_BYTES) or settings
    value = described.get("chat_template", "")
    if isinstance(value, list):  # several named templates
        named = [each.get("template") for each in value if isinstance(each, dict) and each.get("name") == "default"]
        value = named[0] if named else ""
    if not isinstance(value, str):
        raise ModelError(f"{model.path}: its chat_template is {short(value)}, not a string; set model.chat_template")
    return value


# -- tokenizer.json ------------------------------------------------------------------------------------------------


def _damaged(path: Path, reason: str) -> ModelError:
    return ModelError(f"{path}: {reason}; {FETCH_AGAIN}")


def _unsupported(path: Path, reason: str) -> ModelError:
    return ModelError(f"{path}: {reason}, which is not supported; use another model")


def _part(description: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = description.get(key)
    return value if isinstance(value, dict) else {}


def _vocabulary(description: Mapping[str, Any], path: Path) -> dict[str, int]:
    model = _part(description, "model")
    if model.get("type") != "BPE":
        raise _unsupported(path, f"its type is {short(model.get('type'))}, not BPE")
    vocabulary = model.get("vocab")
    if not isinstance(vocabulary, dict) or not all(type(each) is int for each in vocabulary.values()):
        raise _damaged(path, "it has no vocabulary")
    return vocabulary


def _added_tokens(description: Mapping[str, Any], path: Path, n_vocab: int) -> list[dict[str, Any]]:
    """The added tokens that the model has; some tokenizers have more."""
    found = description.get("added_tokens") or []
    tokens = []
    for token in found if isinstance(found, list) else [found]:
        content, token_id = (token.get("content"), token.get("id")) if isinstance(token, dict) else (None, None)
        if not isinstance(content, str) or not content or type(token_id) is not int or token_id < 0:
            raise _damaged(path, f"it has an invalid added token {short(token)}")
        if len(content) > MAX_TOKEN_LENGTH:
            raise _damaged(path, f"it has an added token of {len(content)} characters")
        flags = {key: token.get(key) is True for key in ("special", "lstrip", "rstrip", "single_word")}
        if flags["single_word"]:
            raise _unsupported(path, f"its token {short(content)} has single_word")
        if token_id < n_vocab:
            tokens.append({"content": content, "id": token_id, **flags})
    return tokens


def _read_pieces(description: Mapping[str, Any], path: Path, n_vocab: int) -> list[bytes]:
    """The bytes of every token. Ids that the tokenizer does not have are empty: models have spare ones."""
    spell = _spelling(description, path)
    pieces = [b""] * n_vocab
    for text, token_id in _vocabulary(description, path).items():
        if len(text) > MAX_TOKEN_LENGTH:
            raise _damaged(path, f"its vocabulary has a token of {len(text)} characters")
        if not 0 <= token_id < n_vocab:
            raise _damaged(path, f"its token {short(text)} has id {token_id}, but the model has {n_vocab} tokens")
        pieces[token_id] = spell(text)
    return pieces


def _spelling(description: Mapping[str, Any], path: Path) -> Callable[[str], bytes]:
    """How to turn a token's name into its bytes, depending on the decoder."""
    decoder = _part(description, "decoder")
    steps = decoder.get("decoders") if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps if isinstance(step, dict)] if isinstance(steps, list) else []
    if kinds == ["ByteLevel"]:
        return lambda text: bpe.token_bytes(text, TokenKind.NORMAL)
    if "ByteFallback" in kinds or kinds == ["Metaspace"]:
        return lambda text: spm.token_bytes(text, TokenKind.BYTE if spm.is_byte(text) else TokenKind.NORMAL)
    raise _unsupported(path, f"its decoder is {short(decoder.get('type'))}, not byte-level or with byte fallback")


def _encoder(description: Mapping[str, Any], path: Path) -> Encoder:
    """The library without added tokens and post-processing."""
    library = _build({**description, "added_tokens": [], "post_processor": None}, path)

    def encode(texts: list[str]) -> list[list[int]]:
        return [each.ids for each in library.encode_batch_fast(texts, add_special_tokens=False)]

    return encode


def _inner_encoder(description: Mapping[str, Any], path: Path) -> Encoder | None:
    """The encoder for text that is not first, if it differs."""
    before = _part(description, "pre_tokenizer")
    steps = before.get("pretokenizers") if before.get("type") == "Sequence" else [before]
    if not isinstance(steps, list) or not any(_marks_first(step) for step in steps):
        return None
    changed = [step | {"prepend_scheme": "never"} if _marks_first(step) else step for step in steps]
    return _encoder({**description, "pre_tokenizer": {"type": "Sequence", "pretokenizers": changed}}, path)


def _marks_first(step: Any) -> bool:
    return isinstance(step, dict) and step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first"


def _read_bos(description: Mapping[str, Any], path: Path) -> tuple[int | None, bool]:
    """The BOS token, and whether the tokenizer puts it before every prompt."""
    if _part(description, "post_processor").get("type") in (None, "ByteLevel"):
        return None, False
    library = _build(description, path)
    ids = library.encode("a", add_special_tokens=True).ids
    bare = library.encode("a", add_special_tokens=False).ids
    starts = [at for at in range(len(ids) - len(bare) + 1) if ids[at : at + len(bare)] == bare]
    if not starts or starts[0] > 1:
        raise _unsupported(path, "it puts more than one token before a prompt")
    return (ids[0], True) if starts[0] else (None, False)


def _build(description: Mapping[str, Any], path: Path) -> Library:
    """Build the library's tokenizer without truncation, padding and decoder."""
    try:
        return Library.from_str(json.dumps({**description, "truncation": None, "padding": None, "decoder": None}))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library may also panic, which is not an Exception
        raise _damaged(path, f"is not a valid tokenizer ({short(str(error), 200)})") from error


def _trimmed(fragments: Sequence[str | int], swallows: Mapping[int, tuple[bool, bool]]) -> list[str | int]:
    parts: list[str | int] = []
    for at, fragment in enumerate(fragments):
        if isinstance(fragment, str):
            before, after = fragments[at - 1] if at else None, fragments[at + 1] if at + 1 < len(fragments) else None
            if isinstance(before, int) and swallows.get(before, (False, False))[1]:
                fragment = fragment.lstrip()
            if isinstance(after, int) and swallows.get(after, (False, False))[0]:
                fragment = fragment.rstrip()
            if not fragment:
                continue
        parts.append(fragment)
    return parts
