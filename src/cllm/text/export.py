"""Exports a model's tokenizer as a Hugging Face directory, for load testers and other tools that count tokens."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from cllm.errors import ModelError
from cllm.models.gguf import GGUFModel
from cllm.models.hf_directory import HFModel
from cllm.text import bpe, spm
from cllm.text.template_source import TemplateSource
from cllm.text.tokenizer import load_tokenizer
from cllm.text.vocab import TokenKind, Vocabulary, read_vocabulary

_TOKENIZER = "tokenizer.json"
_SETTINGS = "tokenizer_config.json"
_COPIED = (_TOKENIZER, _SETTINGS, "special_tokens_map.json", "chat_template.jinja", "chat_template.json")


def export_tokenizer(model: GGUFModel | HFModel, template: TemplateSource, directory: Path) -> list[Path]:
    """Write the files and return their paths. Existing files are not overwritten."""
    try:
        if (directory / _TOKENIZER).exists() or (directory / _SETTINGS).exists():
            raise ModelError(f"{directory}: already contains a tokenizer; use another directory")
        directory.mkdir(parents=True, exist_ok=True)
        if isinstance(model, HFModel):
            found = [name for name in _COPIED if (model.path / name).is_file()]
            return [Path(shutil.copyfile(model.path / name, directory / name)) for name in found]
        settings = json.dumps(_settings(model, template), ensure_ascii=False, indent=2)
        texts = {_TOKENIZER: build_library(model).to_str(pretty=True), _SETTINGS: f"{settings}\n"}
        for name, text in texts.items():
            (directory / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ModelError(f"{directory}: cannot write a tokenizer here: {error.strerror or error}") from None
    return [directory / name for name in texts]


def build_library(model: GGUFModel) -> Tokenizer:
    """A tokenizer of the `tokenizers` library that gives the same tokens as ours."""
    ours, vocab = load_tokenizer(model), read_vocabulary(model)
    library = _sentencepiece(model, vocab) if model.get("tokenizer.ggml.model", "") == "llama" else _bpe(model, vocab)
    named = list(zip(vocab.tokens, vocab.kinds, strict=True))
    library.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for i, (text, _) in enumerate(named) if vocab.is_special(i)]
    )
    library.add_tokens([AddedToken(text, normalized=False) for text, kind in named if kind == TokenKind.USER_DEFINED])
    if ours.add_bos and ours.bos_id is not None:
        bos = vocab.tokens[ours.bos_id]
        library.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, ours.bos_id)]
        )
    return library


def _bpe(model: GGUFModel, vocab: Vocabulary) -> Tokenizer:
    rules = bpe.read_rules(model, vocab)
    library = Tokenizer(models.BPE(vocab=vocab.ids, merges=rules.merges, ignore_merges=rules.whole_words_first))
    steps: list[Any] = rules.splits()
    if rules.missing:
        # Bytes without a token are dropped, and their neighbours must not merge.
        without = f"[{''.join(map(re.escape, rules.missing))}]"
        steps.append(pre_tokenizers.Split(Regex(without), "removed"))
    library.pre_tokenizer = pre_tokenizers.Sequence(steps)
    library.decoder = decoders.ByteLevel()
    return library


def _sentencepiece(model: GGUFModel, vocab: Vocabulary) -> Tokenizer:
    rules = spm.read_rules(model, vocab)
    library = Tokenizer(models.BPE(vocab=vocab.ids, merges=rules.whole_merges(), byte_fallback=True))
    blanks = normalizers.Replace(" ", spm.SPACE)
    library.normalizer = normalizers.Sequence([normalizers.Prepend(rules.prefix), blanks]) if rules.prefix else blanks
    steps: list[Any] = [decoders.Replace(spm.SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if rules.prefix else steps)
    return library


def _settings(model: GGUFModel, template: TemplateSource) -> dict[str, Any]:
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.spec.context_length,
        "clean_up_tokenization_spaces": False,
        "bos_token": template.bos or None,
        "eos_token": template.eos or None,
        "chat_template": template.source,
    }
    return {key: value for key, value in settings.items() if value is not None}
