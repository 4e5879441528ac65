"""Configuration: one validated tree; defaults < YAML file < CLLM_* environment < flags."""

from cllm.config.entries import ModelEntry
from cllm.config.load import LoadedConfig, config_of, load_config
from cllm.config.problems import InvalidConfigError
from cllm.config.server import ServerConfig
from cllm.config.sources import parse_assignment
from cllm.config.tree import (
    BackendConfig,
    Config,
    FakeConfig,
    LlamaCppConfig,
    LogConfig,
    ModelConfig,
    NativeConfig,
    PromptConfig,
    ResourcesConfig,
    SchedulerConfig,
)

__all__ = [
    "BackendConfig",
    "Config",
    "FakeConfig",
    "InvalidConfigError",
    "LlamaCppConfig",
    "LoadedConfig",
    "LogConfig",
    "ModelConfig",
    "ModelEntry",
    "NativeConfig",
    "PromptConfig",
    "ResourcesConfig",
    "SchedulerConfig",
    "ServerConfig",
    "config_of",
    "load_config",
    "parse_assignment",
]
