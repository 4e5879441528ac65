"""The text side of Hugging Face directories: tokens as the `tokenizers` library makes them, templates, ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library

from cllm.errors import ModelError
from cllm.models.hf_directory import HFModel
from cllm.text.chat_template import ChatTemplate
from cllm.text.hf_tokenizer import load_hf_chat_template, load_hf_tokenizer
from cllm.text.tokenizer import Tokenizer
from hf_kit import byte_tokenizer, spm_tokenizer, write_directory

TEXTS = [
    "hello world",
    " hello",
    "",
    "a\n\nb  c",
    "héllo wörld 中文 🙂",
    "x" * 3000,
    "<tool>hello<tool> w",
    "abab ab a b",
]
MARKED = ["<s>hello</s>", "a <s> b", "hello</s></s> hello", "<s>", "ab</s>ab ab"]


def opened(path: Path, **options: Any) -> tuple[HFModel, Tokenizer]:
    model = HFModel.open(write_directory(path, **options))
    return model, load_hf_tokenizer(model)


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        opened(path, **options)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["byte-level", "always", "first", "never"])
def test_tokens_are_those_of_the_library(kind: str, tmp_path: Path) -> None:
    description = byte_tokenizer() if kind == "byte-level" else spm_tokenizer(kind)
    library = Library.from_str(json.dumps(description))
    _, tokenizer = opened(tmp_path, tokenizer=description)
    assert (tokenizer.add_bos, tokenizer.bos_id) == ((False, None) if kind == "byte-level" else (True, 1))
    for text in [*TEXTS, *MARKED]:
        assert tokenizer.encode(text, special=True) == library.encode(text).ids, text
    library.encode_special_tokens = True
    for text in TEXTS:
        assert tokenizer.encode(text, add_bos=False) == library.encode(text, add_special_tokens=False).ids, text


@pytest.mark.parametrize("kind", ["byte-level", "first"])
def test_tokens_and_back(kind: str, tmp_path: Path) -> None:
    _, tokenizer = opened(tmp_path, tokenizer=byte_tokenizer() if kind == "byte-level" else spm_tokenizer(kind))
    for text in TEXTS:
        ids = tokenizer.encode(text)
        put_before = " " if kind == "first" and text and not text.startswith(" ") else ""
        assert tokenizer.decode(ids) == put_before + text
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == tokenizer.decode(ids)
    assert tokenizer.decode(tokenizer.encode("<s>", special=True, add_bos=False), skip_special=False) == "<s>"


def test_names_of_special_tokens_in_text_stay_text(tmp_path: Path) -> None:
    _, tokenizer = opened(tmp_path)
    ids = tokenizer.encode("hello</s>")
    assert 1 not in ids and tokenizer.decode(ids) == "hello</s>"
    assert tokenizer.encode("</s></s>", special=True, literal=[6])[0] == 1
    assert tokenizer.encode("</s></s>", special=True, literal=[6]).count(1) == 1
    assert tokenizer.encode("<tool>") == [2] and tokenizer.token_bytes(2) == b"<tool>"


def test_ids_that_the_tokenizer_does_not_know_are_empty(tmp_path: Path) -> None:
    model, tokenizer = opened(tmp_path)
    assert tokenizer.vocab_size == model.spec.n_vocab == 300
    assert tokenizer.token_bytes(299) == b"" and tokenizer.token_text(1) == "</s>"


def test_tokens_that_take_the_blanks_beside_them(tmp_path: Path) -> None:
    description = byte_tokenizer()
    description["added_tokens"][1] |= {"lstrip": True, "rstrip": True}
    library = Library.from_str(json.dumps(description))
    _, tokenizer = opened(tmp_path, tokenizer=description)
    for text in ("hello  </s>  hello </s> ", " </s>", "</s> </s>"):
        assert tokenizer.encode(text, special=True) == library.encode(text).ids


# -- ends and templates --------------------------------------------------------------------------------------------


def test_all_files_may_name_ends(tmp_path: Path) -> None:
    _, tokenizer = opened(tmp_path / "a", generation_config={"eos_token_id": [5, 6]})
    assert tokenizer.eos_ids == {1, 5, 6}
    settings = {"eos_token": {"content": "<s>"}, "bos_token": "</s>"}
    _, tokenizer = opened(tmp_path / "b", config={"eos_token_id": None}, tokenizer_config=settings)
    assert tokenizer.eos_ids == {0} and tokenizer.bos_id == 1 and not tokenizer.add_bos


@pytest.mark.parametrize("wrong", [300, -1, "2", [1, 1.5], True])
def test_ends_that_are_no_tokens(wrong: Any, tmp_path: Path) -> None:
    assert "eos_token_id is" in refusal(tmp_path, generation_config={"eos_token_id": wrong})


def test_where_chat_templates_stand(tmp_path: Path) -> None:
    def render(**options: Any) -> str:
        return ChatTemplate.of(load_hf_chat_template(opened(tmp_path, **options)[0])).render(
            [{"role": "user", "content": "hi"}]
        )

    assert render() == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render(tokenizer_config={"chat_template": "{{ bos_token }}A", "bos_token": "<s>"}) == "<s>A"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert render(tokenizer_config={"chat_template": named}) == "D"
    assert render(chat_template={"chat_template": "B"}) == "B"
    (tmp_path / "chat_template.jinja").write_text("C{{ messages[0].content }}")
    assert render() == "Chi"


def test_templates_that_are_none(tmp_path: Path) -> None:
    model, _ = opened(tmp_path, tokenizer_config={"chat_template": 5})
    with pytest.raises(ModelError, match=r"chat_template is 5, not a string; set model\.chat_template"):
        load_hf_chat_template(model)
    assert ChatTemplate.of(load_hf_chat_template(model, "own")).render([{"role": "user", "content": "hi"}]) == "own"


# -- what goes wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": {"type": "WordPiece", "vocab": {}}}, "its type is 'WordPiece', not BPE"),
        ({"model": {"type": "BPE", "vocab": []}}, "it has no vocabulary"),
        ({"model": {"type": "BPE", "vocab": {"a": 300}, "merges": []}}, "its token 'a' has id 300"),
        ({"model": {"type": "BPE", "vocab": {"a" * 2000: 3}, "merges": []}}, "a token of 2000 characters"),
        ({"decoder": {"type": "WordPiece"}}, "its decoder is 'WordPiece'"),
        ({"decoder": {"type": "Sequence", "decoders": 5}}, "its decoder is 'Sequence'"),
        ({"decoder": None}, "its decoder is None"),
        ({"added_tokens": [5]}, "it has an invalid added token 5"),
        ({"added_tokens": [{"id": 3, "content": ""}]}, "it has an invalid added token"),
        ({"added_tokens": [{"id": 3, "content": "x", "single_word": True}]}, "has single_word"),
        ({"pre_tokenizer": {"type": "Unheard"}}, "is not a valid tokenizer"),
        ({"pre_tokenizer": {"type": "Sequence"}}, "is not a valid tokenizer"),
    ],
)
def test_tokenizers_that_are_damaged_or_foreign(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    assert said in refusal(tmp_path, tokenizer=byte_tokenizer(**changes))


def test_a_missing_tokenizer(tmp_path: Path) -> None:
    model = HFModel.open(write_directory(tmp_path))
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json: is missing"):
        load_hf_tokenizer(model)
