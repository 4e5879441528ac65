"""The configuration: defaults < YAML file < CLLM_* environment variables < flags, validated as a whole.

schema.py         `Config` and most sections; backend.py, kv.py, server.py hold the largest ones
model_entry.py    an entry of `models`: one of several models with its own settings
sources.py        reading settings from files, the environment and flags
load.py           merging and validating them, and explaining errors
consistency.py    checks between settings
keys.py           all dotted keys, and suggestions for misspelt ones
line_pattern.py   regular expressions that take linear time, for `prompt.volatile_patterns`
"""

from cllm.config.backend import BackendConfig, FakeConfig, LlamaCppConfig, NativeConfig
from cllm.config.errors import InvalidConfigError
from cllm.config.load import LoadedConfig, config_of, load_config
from cllm.config.model_entry import ModelEntry
from cllm.config.schema import (
    Config,
    LogConfig,
    ModelConfig,
    ObserveConfig,
    PromptConfig,
    ResourcesConfig,
    SchedulerConfig,
)
from cllm.config.server import ServerConfig
from cllm.config.sources import parse_assignment

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
    "ObserveConfig",
    "PromptConfig",
    "ResourcesConfig",
    "SchedulerConfig",
    "ServerConfig",
    "config_of",
    "load_config",
    "parse_assignment",
]
