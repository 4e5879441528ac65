"""Configuration: precedence, provenance, and errors that name the key, the value, the place and the fix."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cllm.config import Config, InvalidConfigError, LoadedConfig, config_of, load_config, parse_assignment
from cllm.config.consistency import check_backend_consistency
from cllm.config.keys import KEYS
from cllm.errors import ConfigError

SLOTS = Config().backend.llama_cpp.n_seq_max


def load(file: Path | None = None, flags: Mapping[str, Any] | None = None, **environ: str) -> LoadedConfig:
    return load_config(file, flags, environ)


def problems(file: Path | None = None, flags: Mapping[str, Any] | None = None, **environ: str) -> tuple[str, ...]:
    with pytest.raises(InvalidConfigError) as caught:
        load(file, flags, **environ)
    assert "\n" not in str(caught.value)
    return caught.value.problems


@pytest.fixture
def yaml_file(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "cllm.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_defaults_are_those_of_the_contract() -> None:
    config = load().config
    assert config == Config()
    assert (config.model.name, config.backend.type) == ("smollm2", "auto")
    assert (config.server.host, config.server.port, config.server.api_key) == ("127.0.0.1", 8000, None)
    assert config.scheduler.kv_cache_eviction_threshold == 0.8
    assert config.resources.kv_cache_max_memory_mb is None


def test_every_key_is_described_on_one_line_and_has_a_source() -> None:
    loaded = load()
    assert set(loaded.sources) == set(KEYS)
    assert set(loaded.sources.values()) == {"default"}
    for key, field in KEYS.items():
        assert field.description and "\n" not in field.description, key


def test_each_source_covers_the_one_below(yaml_file: Any) -> None:
    path = yaml_file("server: {host: a, port: 1, max_prompts: 11}\nlog: {level: error}\n")
    loaded = load(
        path,
        {"server.port": 3},
        CLLM_SERVER__PORT="2",
        CLLM_SERVER__HOST="b",
    )
    server = loaded.config.server
    assert (server.port, server.host, server.max_prompts, loaded.config.log.level) == (3, "b", 11, "error")
    assert loaded.sources["server.port"] == "flag"
    assert loaded.sources["server.host"] == "env CLLM_SERVER__HOST"
    assert loaded.sources["server.max_prompts"] == f"file {path}"
    assert loaded.sources["server.max_body_bytes"] == "default"


def test_configuration_cannot_be_changed_after_loading() -> None:
    with pytest.raises(ValidationError):
        load().config.server.port = 1  # type: ignore[misc]


def test_flags_may_be_nested_mappings() -> None:
    assert load(flags={"backend": {"type": "fake", "fake": {"layout": "slots"}}}).config.backend.fake.layout == "slots"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("server.port=8001", 8001),
        ("scheduler.watermark=1e-3", 0.001),
        ("scheduler.watermark=0", 0.0),
        ("backend.llama_cpp.mlock=true", True),
        ("server.cors_origins=[http://a, http://b]", ("http://a", "http://b")),
        ("resources.max_context_length=null", None),
        ("server.api_key=12345", "12345"),
        ("server.api_key=# not: [a comment", "# not: [a comment"),
        ("server.api_key=a=b", "a=b"),
        ("server.api_key=null", None),
        ("model.alias=", None),
        ("model.name=null", "null"),
        ("model.chat_template=my.jinja", Path("my.jinja")),
    ],
)
def test_set_reads_values_by_the_kind_of_their_key(text: str, expected: object) -> None:
    key, value = parse_assignment(text)
    assert load(flags={key: value}).config.at(key) == expected
    variable = "CLLM_" + key.upper().replace(".", "__")
    assert load(**{variable: text.partition("=")[2]}).config.at(key) == expected


@pytest.mark.parametrize("text", ["server.port", "=3", ""])
def test_set_without_key_or_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        parse_assignment(text)


def test_unknown_keys_name_their_line_and_the_nearest_key(yaml_file: Any) -> None:
    path = yaml_file("server:\n  prot: 1\nscheduler:\n  kvCacheEvictionThreshold: 0.7\nbananas: 1\n")
    assert problems(path) == (
        f"{path}:2: unknown key server.prot: did you mean server.port?",
        f"{path}:4: unknown key scheduler.kvCacheEvictionThreshold: "
        "did you mean scheduler.kv_cache_eviction_threshold?",
        f"{path}:5: unknown key bananas: "
        "choose from model, models, backend, resources, kv, scheduler, drafts, structured, work, server, prompt, "
        "chat, responses, cluster, log, observe",
    )


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("kvCacheMaxSize", "resources.kv_cache_max_size"),
        ("scheduler.kv-cache-eviction-threshold", "scheduler.kv_cache_eviction_threshold"),
        ("resources.n_seq_max", "backend.llama_cpp.n_seq_max"),
        ("backend.llamacpp", "backend.llama_cpp"),
        ("n_seqmax", "backend.llama_cpp.n_seq_max"),
        ("sever.port", "server.port"),
    ],
)
def test_suggestions(wrong: str, right: str) -> None:
    assert problems(flags={wrong: 1}) == (f"unknown key {wrong}: did you mean {right}?",)


def test_unknown_variables_are_errors_but_for_the_documented_ones() -> None:
    assert problems(CLLM_SERVER_PORT="1", CLLM_CACHE_DIR="/x", HOME="/y", CLLM_SERVER="{port: 1}") == (
        "environment variable CLLM_SERVER names a section: set its keys, such as CLLM_SERVER__HOST",
        "unknown environment variable CLLM_SERVER_PORT: did you mean CLLM_SERVER__PORT?",
    )


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("server.port", 70000, "server.port is 70000 (flag): it must be at most 65535 (default 8000)"),
        ("server.port", True, "server.port is true (flag): it must be a whole number (default 8000)"),
        ("server.port", "8000", "server.port is '8000' (flag): it must be a whole number (default 8000)"),
        ("server.port", None, "server.port is null (flag): it must be a whole number (default 8000)"),
        (
            "scheduler.watermark",
            float("nan"),
            "scheduler.watermark is nan (flag): it must be a finite number (default 0.02)",
        ),
        (
            "scheduler.max_queue",
            0,
            "scheduler.max_queue is 0 (flag): it must be at least 1 (default 256)",
        ),
        (
            "scheduler.max_running",
            0,
            "scheduler.max_running is 0 (flag): it must be at least 1 or null (default null)",
        ),
        (
            "resources.kv_type_v",
            "q5_1",
            "resources.kv_type_v is 'q5_1' (flag): it must be f16, q8_0, q4_0, bf16, f32, fp8 or int8 (default f16)",
        ),
        (
            "server.cors_origins",
            [1],
            "server.cors_origins is [1] (flag): it must be a list in which each item is a string (put it in quotes) "
            "(default [])",
        ),
        (
            "server.api_key",
            12345,
            "server.api_key is ******** (flag): it must be a string (put it in quotes) or null (default null)",
        ),
        (
            "backend.llama_cpp.n_seq_max",
            257,
            f"backend.llama_cpp.n_seq_max is 257 (flag): it must be at most 256 (default {SLOTS})",
        ),
    ],
)
def test_wrong_values_name_key_value_source_and_fix(key: str, value: object, expected: str) -> None:
    assert problems(flags={key: value}) == (expected,)


def test_all_problems_are_reported_at_once(yaml_file: Any) -> None:
    path = yaml_file("server:\n  port: x\nlog: 5\nmodel: {name: ''}\n")
    found = problems(path, CLLM_LOG__LEVEL="loud", CLLM_SERVER__MAX_PROMPTS="[")
    assert [line for line in found if f"{path}:2" in line and "server.port is 'x'" in line]
    assert [line for line in found if line.startswith(f"{path}:3: log is 5, but it is a section")]
    assert [line for line in found if "model.name is ''" in line]
    assert [line for line in found if "log.level is 'loud' (env CLLM_LOG__LEVEL)" in line]
    assert [line for line in found if "CLLM_SERVER__MAX_PROMPTS" in line and "not valid YAML" in line]
    assert len(found) == 5


LLAMA_CPP_RELATIONS = [
    (
        {"resources.kv_cache_max_size": 1},
        ("resources.kv_cache_max_size is 1 (flag)", f"backend.llama_cpp.n_seq_max is {SLOTS} (default)"),
    ),
    (
        {"scheduler.max_running": 5, "backend.llama_cpp.n_seq_max": 4},
        ("scheduler.max_running is 5 (flag)", "backend.llama_cpp.n_seq_max is 4 (flag)"),
    ),
    (
        {"resources.kv_type_v": "q8_0", "backend.llama_cpp.flash_attention": False},
        ("resources.kv_type_v is q8_0 (flag)", "backend.llama_cpp.flash_attention is false (flag)"),
    ),
    (
        {"backend.llama_cpp.n_ubatch": 4096},
        ("backend.llama_cpp.n_ubatch is 4096 (flag)", "backend.llama_cpp.n_batch is 2048 (default)"),
    ),
    (
        {"scheduler.max_step_tokens": 4096},
        ("scheduler.max_step_tokens is 4096 (flag)", "backend.llama_cpp.n_batch is 2048 (default)"),
    ),
]


@pytest.mark.parametrize(("flags", "keys"), LLAMA_CPP_RELATIONS)
def test_impossible_relations_name_both_sides(flags: dict[str, object], keys: tuple[str, ...]) -> None:
    (problem,) = problems(flags={"backend.type": "llama_cpp", **flags})
    assert all(key in problem for key in keys)


@pytest.mark.parametrize(("flags", "keys"), LLAMA_CPP_RELATIONS)
def test_auto_leaves_them_open_until_the_model_has_decided(flags: dict[str, object], keys: tuple[str, ...]) -> None:
    config = load(flags=flags).config
    (problem,) = check_backend_consistency(config, "llama_cpp")
    assert all(key.partition(" (")[0] in problem for key in keys)
    assert check_backend_consistency(config, "native") == []


def test_a_small_batch_of_llama_cpp_is_fine_unless_steps_are_set() -> None:
    small = {"backend.type": "llama_cpp", "backend.llama_cpp.n_batch": 256, "backend.llama_cpp.n_ubatch": 256}
    assert load(flags=small).config.scheduler.max_step_tokens is None
    assert problems(flags={**small, "scheduler.max_step_tokens": 512})


def test_native_blocks_are_whole_tiles() -> None:
    assert problems(flags={"backend.type": "native", "resources.block_size": 24}) == (
        "resources.block_size is 24 (flag): the native backend needs a multiple of 16",
    )
    assert load(flags={"backend.type": "native", "resources.block_size": 64}).config.resources.block_size == 64


def test_every_backend_has_its_own_kv_types() -> None:
    assert problems(flags={"backend.type": "native", "resources.kv_type_k": "bf16"}) == (
        "resources.kv_type_k is bf16 (flag): native supports f16, q8_0, q4_0",
    )
    (problem,) = problems(flags={"backend.type": "llama_cpp", "resources.kv_type_v": "f32"})
    assert "resources.kv_type_v is f32 (flag): llama_cpp supports f16, q8_0, q4_0" in problem
    (problem,) = problems(flags={"backend.type": "torch", "resources.kv_type_v": "q8_0"})
    assert "resources.kv_type_v is q8_0 (flag): torch supports f16, bf16, f32, fp8, int8" in problem
    (problem,) = problems(flags={"backend.type": "torch", "resources.kv_type_v": "bf16"})
    assert "resources.kv_type_k is f16 (default) but resources.kv_type_v is bf16 (flag): torch uses one type" in problem
    for kind in ("fp8", "int8"):
        for backend in ("native", "llama_cpp"):
            (problem,) = problems(flags={"backend.type": backend, "resources.kv_type_k": kind})
            assert f"resources.kv_type_k is {kind} (flag): {backend} supports f16, q8_0, q4_0" in problem
        both = {"resources.kv_type_k": kind, "resources.kv_type_v": kind}
        assert load(flags={"backend.type": "torch", **both}).config.resources.kv_type_k == kind
    both = {"resources.kv_type_k": "f32", "resources.kv_type_v": "f32"}
    assert load(flags={"backend.type": "torch", **both}).config.resources.kv_type_k == "f32"


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "CPU", "", "cuda:1000"])
def test_devices_that_torch_does_not_have(device: str) -> None:
    (problem,) = problems(flags={"backend.torch.device": device})
    assert f"backend.torch.device is '{device}' (flag): it must be a string that matches" in problem


def test_the_longest_gap_may_not_be_less_than_the_mean() -> None:
    (problem,) = problems(flags={"scheduler.max_gap_ms": 50.0})
    assert "scheduler.max_gap_ms is 50 (flag)" in problem
    assert "scheduler.inter_token_target_ms is 100 (default)" in problem
    assert load(flags={"scheduler.inter_token_target_ms": 400.0}).config.scheduler.max_gap_ms is None


def test_the_cache_must_hold_all_that_may_run() -> None:
    (problem,) = problems(flags={"scheduler.max_running": 5, "resources.kv_cache_max_size": 4})
    assert "resources.kv_cache_max_size is 4 (flag) but scheduler.max_running is 5 (flag)" in problem
    assert load(flags={"resources.kv_cache_max_size": 4}).config.scheduler.max_running is None


def test_all_bodies_have_room_for_the_largest() -> None:
    (problem,) = problems(flags={"server.max_body_bytes": 100_000_000})
    assert "server.max_bodies_bytes is 67108864 (default) but server.max_body_bytes is 100000000 (flag)" in problem


def test_relations_of_one_backend_do_not_bind_others() -> None:
    flags = {"scheduler.max_running": 200, "resources.block_size": 24}
    assert load(flags={"backend.type": "fake", **flags}).config.scheduler.max_running == 200


def test_a_config_made_in_python_is_checked_too() -> None:
    with pytest.raises(ConfigError, match="each running request needs a sequence"):
        Config.model_validate({"backend": {"type": "llama_cpp"}, "scheduler": {"max_running": SLOTS + 1}})


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("server:\n  port: [1\n", 3, "not valid YAML"),
        ("a: b: c", 1, "not valid YAML"),
        ("server:\n\tport: 1", 2, "not valid YAML"),
        ("- 1\n", 1, "expected sections"),
        ("x " * 1000 + "\n", 1, "expected sections such as 'server:', found 'x x x x x x ...x x x"),
        ("x: 1\n---\ny: 2\n", 2, "not valid YAML"),
    ],
)
def test_broken_yaml_is_one_line_with_its_line_number(yaml_file: Any, text: str, line: int, reason: str) -> None:
    path = yaml_file(text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}:{line}: {reason}")
    assert "\n" not in str(caught.value)


def test_deeply_nested_yaml_is_one_line(yaml_file: Any) -> None:
    path = yaml_file("[" * 5000)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value) == f"{path}: not valid YAML: nested too deeply"
    (problem,) = problems(CLLM_SERVER__MAX_PROMPTS="[" * 5000)
    assert problem.endswith("server.max_prompts is not valid YAML: nested too deeply")


def test_a_key_given_twice_is_refused(yaml_file: Any) -> None:
    path = yaml_file("server:\n  port: 1\n  port: 2\n")
    assert problems(path) == (f"{path}:3: server.port is set twice: keep one",)


def test_merge_keys_may_be_overridden(yaml_file: Any) -> None:
    config = load(yaml_file("server: {<<: {port: 1, max_prompts: 5}, port: 2}\n")).config
    assert (config.server.port, config.server.max_prompts) == (2, 5)


@pytest.mark.parametrize("text", ["", "# nothing\n", "server:\n", "server: {}\nbackend:\n  fake:\n"])
def test_empty_files_and_sections_are_fine(yaml_file: Any, text: str) -> None:
    assert load(yaml_file(text)).config == Config()


def test_keys_that_are_no_text_are_unknown_keys(yaml_file: Any) -> None:
    assert [line.partition(": ")[2][:14] for line in problems(yaml_file("null: 1\n0x10: 2\n"))] == [
        "unknown key No",
        "unknown key 16",
    ]


def test_unreadable_files_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration file .*missing\.yaml: No such file"):
        load(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"model: {name: \xe9}")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(tmp_path / "latin.yaml")
    (tmp_path / "long.yaml").write_text("#" * 1_048_577)  # /dev/zero is longer still
    with pytest.raises(ConfigError, match=r"long\.yaml has more than 1048576 characters"):
        load(tmp_path / "long.yaml")


def test_the_api_key_is_not_shown_by_repr() -> None:
    assert "s3cret" not in repr(load(flags={"server.api_key": "s3cret"}).config)


# --- several models ---


def test_a_model_among_several_has_settings_of_its_own(yaml_file: Any) -> None:
    path = yaml_file(
        "models:\n"
        "  - a.gguf\n"
        "  - {name: b.gguf, aliases: [bee, bumble], pinned: true, chat_template: c.jinja,\n"
        "     resources: {max_context_length: 100, kv_type_k: q8_0}, backend: {type: native}}\n"
        "resources: {max_context_length: 200}\n"
        "model: {alias: nobody}\n"
    )
    config = load(path, {"backend.threads": 3}).config
    first, second = (config_of(config, entry) for entry in config.models)
    assert (first.model.name, first.model.alias, first.resources.max_context_length) == ("a.gguf", None, 200)
    assert (second.model.name, second.model.alias, second.model.chat_template) == ("b.gguf", "bee", Path("c.jinja"))
    assert (second.resources.max_context_length, second.resources.kv_type_k) == (100, "q8_0")
    assert (first.backend.type, second.backend.type) == ("auto", "native")
    assert first.backend.threads == second.backend.threads == 3
    assert first.models == second.models == ()
    assert "kv_memory_fraction" not in first.resources.model_fields_set, "what was not set is still not set"
    several = load(**{"CLLM_MODELS": "[x, {name: y, pinned: true}]"}).config.models
    assert [(entry.name, entry.pinned) for entry in several] == [("x", False), ("y", True)]


def test_what_is_wrong_with_a_model_among_several_is_named(yaml_file: Any) -> None:
    path = yaml_file("models:\n  - {name: a, aliass: [x]}\n  - 17\n  - {pinned: true}\n  - {name: b, load: soon}\n")
    assert problems(path) == (
        f"unknown key models[0].aliass ({path}:1): choose from name, aliases, chat_template, sampling, load, "
        "pinned, unload_after_s, backend, resources, kv, scheduler, drafts, prompt, cluster",
        f"models[1] is 17 ({path}:1): it must be a name, or an object with a name and settings",
        f"models[2].name is missing ({path}:1): every model needs a name",
        f"models[3].load is 'soon' ({path}:1): it must be start or first_use",
    )
    path = yaml_file("models:\n  - {name: a, backend: {typ: native}}\n  - {name: b, scheduler: {max_queue: 0}}\n")
    assert problems(path) == (
        "models[0]: unknown key backend.typ: did you mean backend.type?",
        "models[1]: scheduler.max_queue is 0 (b): it must be at least 1 (default 256)",
    )
