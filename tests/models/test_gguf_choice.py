"""Which .gguf file of a repository is taken, and what `cllm pull` says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cllm.cli import app
from cllm.errors import ModelError
from cllm.models.gguf_choice import choose, gguf_files, quantisation_of
from cllm.models.registry import cache_dir, local_models, resolve
from hub_kit import FILES, Hub, refusal, silent
from native_kit import write_model

GIB = 1 << 30
SIZES = {
    "README.md": 1,
    "mmproj-F16.gguf": GIB,
    "Model-Q8_0.gguf": 8 * GIB,
    "Model-Q4_K_M.gguf": 5 * GIB,
    "Model-Q3_K_S.gguf": 3 * GIB,
    "Model-Q2_K.gguf": 2 * GIB,
    "BF16/Model-BF16-00001-of-00002.gguf": 10 * GIB,
    "BF16/Model-BF16-00002-of-00002.gguf": 6 * GIB,
}


@pytest.mark.parametrize(
    ("name", "quantisation"),
    [
        ("Llama-3.2-1B-Instruct-Q4_K_M.gguf", "Q4_K_M"),
        ("qwen2.5-0.5b-instruct-q5_0.gguf", "Q5_0"),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("Model-UD-IQ2_XXS.gguf", "IQ2_XXS"),
        ("Model-UD-Q4_K_XL.gguf", "Q4_K_XL"),
        ("sub/gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("BF16/Model-BF16-00001-of-00002.gguf", "BF16"),
        ("model.gguf", None),
        ("Q4you.gguf", None),
    ],
)
def test_quantisations_are_read_from_names(name: str, quantisation: str | None) -> None:
    assert quantisation_of(name) == quantisation


def test_parts_are_one_model_and_projectors_are_none() -> None:
    found = gguf_files(SIZES)
    assert [file.quantisation for file in found] == ["Q2_K", "Q3_K_S", "Q4_K_M", "Q8_0", "BF16"]
    assert str(found[-1]) == "BF16/Model-BF16-00001-of-00002.gguf (16,384 MiB), in 2 parts"


def test_every_size_of_a_repository_with_large_variants_only() -> None:
    sizes = {f"Model-UD-Q{bits}_K_XL.gguf": bits * GIB for bits in (2, 4, 8)} | {"Model-BF16.gguf": 16 * GIB}
    chosen = [choose("hf:o/r", gguf_files(sizes), None, memory * GIB).chosen.quantisation for memory in (64, 3)]
    assert chosen == ["Q4_K_XL", "Q2_K_XL"]


@pytest.mark.parametrize(("memory", "chosen"), [(64, "Q4_K_M"), (6, "Q4_K_M"), (5, "Q3_K_S"), (3, "Q2_K")])
def test_the_best_that_fits(memory: int, chosen: str) -> None:
    found = choose("hf:o/r", gguf_files(SIZES), None, memory * GIB)
    assert found.chosen.quantisation == chosen and f"{memory * 1024:,} MiB" in found.why


@pytest.mark.parametrize(
    ("wanted", "memory", "problem"),
    [
        (None, 1, "none of its files fits into 1,024 MiB of memory: Model-Q2_K.gguf (2,048 MiB), "),
        ("Q6_K", 64, "there is no Q6_K; the repository has Model-Q2_K.gguf (2,048 MiB), Model-Q3_K_S.gguf"),
        ("bf16", 64, "BF16/Model-BF16-00001-of-00002.gguf is one of 2 parts"),
    ],
)
def test_what_cannot_be_taken(wanted: str | None, memory: int, problem: str) -> None:
    with pytest.raises(ModelError, match="hf:o/r") as caught:
        choose("hf:o/r", gguf_files(SIZES), wanted, memory * GIB)
    assert problem in str(caught.value)


def test_a_quantisation_that_two_files_have() -> None:
    files = gguf_files({"a-Q4_0.gguf": 1, "b-Q4_0.gguf": 2})
    with pytest.raises(
        ModelError, match=r"several files are Q4_0: a-Q4_0.gguf \(0 MiB\), b-Q4_0.gguf.*name one: hf:o/r/FILE"
    ):
        choose("hf:o/r:Q4_0", files, "Q4_0", GIB)
    assert choose("hf:o/r", files, None, GIB).chosen.name == "b-Q4_0.gguf"


# -- against a hub -------------------------------------------------------------------------------------------------


@pytest.fixture
def offers(hub: Hub) -> Hub:
    hub.repositories["org/many"] = {
        "README.md": b"",
        "m-Q8_0.gguf": b"GGUF 8888",
        "m-Q4_K_M.gguf": b"GGUF 4",
        "m-F16-00001-of-00002.gguf": b"GGUF 1",
        "m-F16-00002-of-00002.gguf": b"GGUF 2",
    }
    return hub


def test_one_file_is_fetched_and_found_again(offers: Hub) -> None:
    path = resolve("hf:org/many", progress=silent)
    assert path.read_bytes() == b"GGUF 4" and offers.downloads() == ["m-Q4_K_M.gguf"]
    offers.asked.clear()
    assert resolve("hf:org/many", progress=silent) == path
    assert resolve("hf:org/many/m-Q4_K_M.gguf", progress=silent) == path and not offers.asked
    assert resolve("hf:org/many:q8_0", progress=silent).read_bytes() == b"GGUF 8888"
    listed = [name for name, _ in local_models()]
    assert {"hf:org/many/m-Q4_K_M.gguf", "hf:org/many/m-Q8_0.gguf"} <= set(listed)


def test_pull_lists_what_is_there(offers: Hub) -> None:
    shown = CliRunner().invoke(app, ["pull", "hf:org/many"])
    assert shown.exit_code == 0, shown.output
    assert Path(shown.stdout.strip()).name == "m-Q4_K_M.gguf"
    lines = [" ".join(line.split()) for line in shown.stderr.splitlines() if "gguf" in line]
    assert lines[:3] == [
        "→ Q4_K_M m-Q4_K_M.gguf (0 MiB)",
        "Q8_0 m-Q8_0.gguf (0 MiB)",
        "F16 m-F16-00001-of-00002.gguf (0 MiB), in 2 parts",
    ]
    assert lines[3].startswith("using m-Q4_K_M.gguf, the best that fits into ")


def test_safetensors_go_before_gguf_unless_a_quantisation_is_asked_for(offers: Hub) -> None:
    offers.repositories["org/both"] = FILES | {"m-Q4_0.gguf": b"GGUF"}
    assert resolve("hf:org/both", progress=silent).is_dir()
    assert resolve("hf:org/both:Q4_0", progress=silent).read_bytes() == b"GGUF"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("hf:org/many/m-F16-00002-of-00002.gguf", "m-F16-00002-of-00002.gguf is one of 2 parts"),
        ("hf:org/many:F16", "m-F16-00001-of-00002.gguf is one of 2 parts"),
        ("hf:org/many:Q5_K_M", "there is no Q5_K_M; the repository has m-Q4_K_M.gguf"),
        ("hf:org/repo:Q4_0", "has no .gguf files"),
        ("hf:org/many:", "is not a model name"),
        ("hf:org/many:Q4_0/m.gguf", "is not a model name"),
        ("hf:org/none", "has neither a config.json nor .gguf files"),
    ],
)
def test_what_is_not_there(offers: Hub, name: str, problem: str) -> None:
    offers.repositories["org/none"] = {"README.md": b""}
    assert problem in refusal(name) and not offers.downloads()


# -- what is on this machine ---------------------------------------------------------------------------------------


def test_models_shows_both_caches_and_known_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLLM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hf"))
    (cache_dir() / "models").mkdir(parents=True)
    mine = write_model(cache_dir() / "models" / "mine.gguf")
    snapshot = tmp_path / "hf" / "models--org--theirs" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    theirs = write_model(snapshot / "theirs.gguf")
    shown = CliRunner().invoke(app, ["models", "--backend", "native", "--json", "-"])
    assert shown.exit_code == 0, shown.output
    known, *here = json.loads(shown.stdout)
    assert known["name"] == "smollm2" and "cllm pull smollm2" in known["problem"]
    assert [row["path"] for row in here] == [str(mine), str(theirs)]
    for row in here:
        assert row["weight_type"] in ("F32", "F16", "Q8_0", "Q4_0") and row["sampling_defaults"] == {}
