"""What holds where a request sets nothing: the configuration, the registry, the model's files, OpenAI's values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cllm.config import Config, config_of, load_config
from cllm.config.model_entry import ModelEntry
from cllm.config.schema import SamplingConfig
from cllm.engine.params import RANGES, RECOMMENDABLE, SamplingParams
from cllm.errors import ConfigError
from cllm.llm import AsyncLLM
from cllm.loading.sampling_defaults import SamplingDefaults, sampling_defaults
from cllm.models.gguf import GGUFModel
from cllm.models.hf_directory import HFModel
from cllm.models.registry import recommended_sampling
from cllm.server.openai.schema import ChatRequest
from gguf_kit import LLAMA_KEYS, write_gguf
from hf_kit import write_directory

ORDINARY = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
TOKENS = {"tokenizer.ggml.tokens": ["a", "b"]}


def config(**settings: Any) -> Config:
    return load_config(None, {key.replace("__", "."): value for key, value in settings.items()}, {}).config


def gguf(directory: Path, **metadata: Any) -> GGUFModel:
    keys = {f"general.sampling.{name}": value for name, value in metadata.items()}
    return GGUFModel.open(write_gguf(directory / "model.gguf", LLAMA_KEYS | TOKENS | keys))


def test_nobody_recommends_anything(tmp_path: Path) -> None:
    found = sampling_defaults(config(), gguf(tmp_path))
    fake = sampling_defaults(config(), None)
    assert fake.values == ORDINARY == SamplingDefaults().values
    assert config().model.name == "smollm2" and found.values == ORDINARY | {"temperature": 0.2, "top_p": 0.9}
    assert found.recommended == {"temperature": 0.2, "top_p": 0.9} and not fake.recommended


def test_gguf_metadata(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = gguf(tmp_path, temp=0.6, top_p=0.95, top_k=20, penalty_repeat=1.05, min_p=7.0)
    found = sampling_defaults(config(model__name="other.gguf"), model)
    expected = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.05}
    assert found.values == expected
    assert found.sources == dict.fromkeys(ORDINARY, "GGUF metadata") | {"min_p": "default"}
    assert "ignoring the recommended min_p = 7.0, which is not a valid value" in caplog.text


def test_generation_config(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_directory(tmp_path / "hf")
    own = path / "generation_config.json"
    own.write_text('{"do_sample": true, "temperature": 0.7, "top_k": 20, "top_p": null, "repetition_penalty": "high"}')
    found = sampling_defaults(config(model__name=str(path)), HFModel.open(path))
    assert found.recommended == {"temperature": 0.7, "top_k": 20}
    assert found.sources["top_k"] == "generation_config.json"
    assert "ignoring the recommended repetition_penalty = 'high'" in caplog.text
    own.write_text("{")
    assert not sampling_defaults(config(model__name=str(path)), HFModel.open(path)).recommended
    assert "ignoring its sampling parameters" in caplog.text


def test_the_configuration_goes_before_the_registry_and_that_before_the_file(tmp_path: Path) -> None:
    model = gguf(tmp_path, temp=0.6, top_k=20)
    found = sampling_defaults(config(model__sampling__top_p=0.5), model)
    assert found.recommended == {"temperature": 0.2, "top_p": 0.5, "top_k": 20}
    shown = {name: found.sources[name] for name in ("temperature", "top_p", "top_k", "min_p")}
    assert list(shown.values()) == ["registry", "configuration", "GGUF metadata", "default"]


def test_one_of_several_models_has_its_own() -> None:
    several = Config(models=(ModelEntry(name="a", sampling={"temperature": 0.3}), ModelEntry(name="b")))
    first, second = (config_of(several, entry).model.sampling for entry in several.models)
    assert (first.temperature, second.temperature) == (0.3, None)
    with pytest.raises(ConfigError, match=r"models\[0\]: model\.sampling\.temperature is -1"):
        load_config(None, {"models": [{"name": "a", "sampling": {"temperature": -1.0}}]}, {})


def test_settings_allow_what_requests_may_ask_for() -> None:
    shown = SamplingConfig.model_json_schema()["properties"]
    assert tuple(shown) == RECOMMENDABLE
    for name in RECOMMENDABLE:
        low, high, open_low = RANGES[name]
        limits = shown[name]["anyOf"][0]
        assert limits["exclusiveMinimum" if open_low else "minimum"] == low
        assert limits.get("maximum") == high


def test_a_requests_own_values_win() -> None:
    defaults = {"temperature": 0.2, "top_p": 0.9}
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], "top_p": 1.0, "top_k": None})
    params = body.sampling(max_tokens=5).completed(defaults)
    assert (params.temperature, params.top_p, params.max_tokens) == (0.2, 1.0, 5)
    assert not params.unset and params.completed(defaults) is params


def test_python_means_what_it_says() -> None:
    assert SamplingParams().completed({"temperature": 0.2}) == SamplingParams()
    assert SamplingParams(temperature=0.0).completed({"temperature": 0.2}).greedy


@pytest.mark.parametrize(("params", "temperature"), [(None, 0.0), (SamplingParams(max_tokens=3), 1.0)])
async def test_where_a_request_is_submitted(params: SamplingParams | None, temperature: float) -> None:
    own = config(backend__type="fake", model__sampling__temperature=0.0)
    async with AsyncLLM(own) as llm, llm.submit("hello", params) as generation:
        assert generation._params.temperature == temperature


def test_a_known_file_is_known_by_its_path_too() -> None:
    by_name = recommended_sampling("smollm2")
    assert by_name and recommended_sampling("/some/where/SmolLM2-135M-Instruct.Q4_1.gguf") == by_name
    assert recommended_sampling("/smollm2/other.gguf") == {}
