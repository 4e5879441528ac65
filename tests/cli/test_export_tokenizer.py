"""Exported tokenizers give the tokens of the model, by the library alone and through `transformers`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library

from cllm.errors import ModelError
from cllm.models.gguf import GGUFModel
from cllm.models.hf_directory import HFModel
from cllm.models.registry import resolve
from cllm.text.chat_template import ChatTemplate
from cllm.text.export import export_tokenizer
from cllm.text.hf_tokenizer import load_hf_chat_template
from cllm.text.template_source import load_chat_template
from cllm.text.tokenizer import load_tokenizer
from gguf_kit import LLAMA_KEYS, write_gguf
from hf_kit import write_directory
from tokenizer_kit import CORPUS, sentencepiece_keys

CHAT = [{"role": "user", "content": "Hi"}]


def as_spm(folder: Path, *, space_prefix: bool) -> Path:
    """With a token for every character that is part of one, as real vocabularies have it."""
    keys = sentencepiece_keys()
    keys["tokenizer.ggml.tokens"].append("字")
    keys["tokenizer.ggml.scores"].append(-900.0)
    keys["tokenizer.ggml.token_type"].append(1)
    return write_gguf(folder / "spm.gguf", {**keys, "tokenizer.ggml.add_space_prefix": space_prefix})


def as_bpe(folder: Path, pre: str) -> Path:
    model = GGUFModel.open(resolve("smollm2"))
    names = ("tokens", "token_type", "merges")
    keys = {f"tokenizer.ggml.{name}": model.get(f"tokenizer.ggml.{name}", []) for name in names}
    ids = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    return write_gguf(
        folder / "bpe.gguf", {**LLAMA_KEYS, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, **keys, **ids}
    )


MODELS: dict[str, Callable[[Path], Path]] = {
    "smollm2": lambda folder: resolve("smollm2"),
    "llama 3": lambda folder: as_bpe(folder, "llama-bpe"),
    "qwen 2": lambda folder: as_bpe(folder, "qwen2"),
    "sentencepiece": lambda folder: as_spm(folder, space_prefix=True),
    "sentencepiece without prefix": lambda folder: as_spm(folder, space_prefix=False),
}
MARKED = [pytest.param(name, marks=() if "piece" in name else pytest.mark.model) for name in MODELS]


def exported(name: str, folder: Path) -> tuple[GGUFModel, Path]:
    model = GGUFModel.open(MODELS[name](folder))
    out = folder / "out"
    export_tokenizer(model, load_chat_template(model), out)
    return model, out


@pytest.mark.parametrize("name", MARKED)
def test_the_library_gives_the_same_tokens(name: str, tmp_path: Path) -> None:
    model, out = exported(name, tmp_path)
    ours, library = load_tokenizer(model), Library.from_file(str(out / "tokenizer.json"))
    for text in CORPUS:
        ids = ours.encode(text, special=True)
        assert library.encode(text).ids == ids, ascii(text[:100])
    assert library.get_vocab_size() == ours.vocab_size
    assert library.decode(ours.encode("Hello, wörld!")) == "Hello, wörld!"


@pytest.mark.parametrize("name", MARKED)
def test_transformers_loads_it_and_gives_the_same_tokens(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model, out = exported(name, tmp_path)
    ours, theirs = load_tokenizer(model), transformers.AutoTokenizer.from_pretrained(out)
    for text in CORPUS:
        assert theirs(text)["input_ids"] == ours.encode(text, special=True), ascii(text[:100])
    assert theirs.eos_token_id in ours.eos_ids
    template = load_chat_template(model)
    rendered: Any = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert rendered == ChatTemplate.of(template).render(CHAT)


def test_a_hugging_face_directory_is_copied(tmp_path: Path) -> None:
    model = HFModel.open(write_directory(tmp_path / "model"))
    written = export_tokenizer(model, load_hf_chat_template(model), tmp_path / "out")
    assert tmp_path / "out" / "tokenizer.json" in written
    for path in written:
        assert path.read_bytes() == (model.path / path.name).read_bytes()


def test_the_command_writes_once_and_touches_nothing_that_is_there(tmp_path: Path) -> None:
    source, out = as_spm(tmp_path, space_prefix=True), tmp_path / "out"
    command = [sys.executable, "-m", "cllm", "export-tokenizer", str(source), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(out / "tokenizer.json"), str(out / "tokenizer_config.json")]
    settings = json.loads((out / "tokenizer_config.json").read_text())
    assert (settings["bos_token"], settings["eos_token"]) == ("<s>", "</s>")
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (again.returncode, "already contains a tokenizer" in again.stderr) == (2, True)
    with pytest.raises(ModelError, match="already"):
        export_tokenizer(GGUFModel.open(source), load_chat_template(GGUFModel.open(source)), out)


@pytest.mark.parametrize("place", ["a file", "a file/below", "/proc/x", "/proc/self", "x" * 300])
def test_a_directory_that_cannot_be_written_is_one_line(place: str, tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    source = as_spm(tmp_path, space_prefix=True)
    command = [sys.executable, "-m", "cllm", "export-tokenizer", str(source), str(tmp_path / place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    warning, *errors = done.stderr.splitlines()
    assert (done.returncode, done.stdout, len(errors)) == (2, "", 1) and "no chat template" in warning, done.stderr
    assert str(tmp_path / place) in done.stderr and "cannot write a tokenizer here" in done.stderr
