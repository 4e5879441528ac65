"""Headers made wrong in every place and in many ways, through the whole path: file, tokenizer, chat template, weights.

A mutant loads or is refused with one line. Nothing else may happen: no other exception, no signal, no hang, no more
memory than a small file is worth.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from gguf_mutants import Parts, key_mutants, take_apart, tensor_mutants, value_mutants
from loading_kit import LoadingProcess
from native_kit import build_model

TEMPLATE = "{% for m in messages %}{{ bos_token }}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{{ eos_token }}"


@pytest.fixture(scope="module")
def loading() -> Iterator[LoadingProcess]:
    process = LoadingProcess(with_text=True)
    yield process
    process.close()


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def parts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Parts:
    model = build_model(n_layers=1, n_vocab=320, tied=True).with_metadata(**{"tokenizer.chat_template": TEMPLATE})
    if request.param == "llama":
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        tokens += [*"abcdefghijklmnopqrstuvwxyz", "▁", "he", "▁a"]
        tokens += [f"word{i}" for i in range(320 - len(tokens))]
        keys = {
            "model": "llama", "pre": None, "merges": None, "tokens": tokens, "scores": [-float(i) for i in range(320)],
            "token_type": [2, 3, 3, *[6] * 256, *[1] * 61], "add_space_prefix": True,
            "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip
        model = model.with_metadata(**{f"tokenizer.ggml.{key}": value for key, value in keys.items()})
    path = model.write(tmp_path_factory.mktemp("sound") / "sound.gguf")
    return take_apart(path.read_bytes())


def check(loading: LoadingProcess, path: Path, mutants: Iterable[tuple[str, bytes]]) -> dict[str, str]:
    """What became of each, all of which must be well."""
    outcomes, wrong = {}, {}
    for name, content in mutants:
        path.write_bytes(content)
        outcome = outcomes[name] = loading.outcome(path)
        one_line = outcome.isprintable() and len(outcome) < 600
        if not one_line or not outcome.startswith(("loaded", f"refused: {path}: ", "refused: the chat template ")):
            wrong[name] = outcome
        if "not enough memory" in outcome:
            wrong[name] = outcome
    assert wrong == {}
    return outcomes


def test_the_sound_file_loads(loading: LoadingProcess, parts: Parts, tmp_path: Path) -> None:
    assert check(loading, tmp_path / "m.gguf", [("sound", parts.encoded())]) == {"sound": "loaded"}


def test_values_of_every_other_kind(loading: LoadingProcess, parts: Parts, tmp_path: Path) -> None:
    outcomes = check(loading, tmp_path / "m.gguf", value_mutants(parts))
    assert len(outcomes) > 400
    wrong_kinds = {"tokens": "many numbers", "merges": "many numbers", "scores": "many texts", "token_type": "floats"}
    for key, kind in wrong_kinds.items():
        said = outcomes.get(f"tokenizer.ggml.{key} = {kind}")
        assert said is None or f"the metadata key tokenizer.ggml.{key} is a list of " in said


def test_keys_missing_twice_and_strange(loading: LoadingProcess, parts: Parts, tmp_path: Path) -> None:
    outcomes = check(loading, tmp_path / "m.gguf", key_mutants(parts))
    assert all(said.startswith("refused") for name, said in outcomes.items() if name.endswith(" twice"))
    assert "split.count is [1, 2, 3]" in outcomes["split.count = numbers"]
    assert r"split.count is 'two\nlines" in outcomes["split.count = lines"]
    assert outcomes["alignment 16"] == "loaded"


def test_tensors_elsewhere_and_of_other_shapes(loading: LoadingProcess, parts: Parts, tmp_path: Path) -> None:
    outcomes = check(loading, tmp_path / "m.gguf", tensor_mutants(parts))
    harmless = ("turned round", "of type f16")  # where it is square, and where its first half is read as such
    assert not [name for name, said in outcomes.items() if said == "loaded" and not name.endswith(harmless)]
    overlapping = [said for name, said in outcomes.items() if name.endswith("in another's place")]
    assert sum("overlap" in said for said in overlapping) >= len(overlapping) - 1  # the first no longer fits at the end


def test_cut_short_anywhere(loading: LoadingProcess, parts: Parts, tmp_path: Path) -> None:
    whole = parts.encoded()
    header = len(whole) - len(parts.data)
    cuts = sorted({*range(0, 64), *range(64, header, header // 100), *range(header, len(whole), len(parts.data) // 20)})
    outcomes = check(loading, tmp_path / "m.gguf", ((f"{cut} bytes", whole[:cut]) for cut in cuts))
    assert all(said.startswith("refused") for said in outcomes.values())


def test_bytes_at_random(loading: LoadingProcess, parts: Parts, tmp_path: Path) -> None:
    draw = random.Random(10)
    whole = parts.encoded()
    header = len(whole) - len(parts.data)
    patches = [b"\xff", b"\0", b"\n", b"\x7f\x80", b"\xff" * 8, b"\0" * 8, (2**31).to_bytes(8, "little")]

    def mutants() -> Iterator[tuple[str, bytes]]:
        for number in range(300):
            content = bytearray(whole)
            for _ in range(draw.randint(1, 4)):
                at, patch = draw.randrange(header), draw.choice([*patches, draw.randbytes(draw.randint(1, 9))])
                content[at : at if draw.random() < 0.1 else at + len(patch)] = patch
            yield f"number {number}", bytes(content)

    check(loading, tmp_path / "m.gguf", mutants())
