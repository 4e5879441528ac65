"""The default model behind a real `cllm serve`, for clients as they are installed from their registries. Without them
these tests are not even looked at: `make test-clients` installs them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

_PACKAGES = (
    "agents",
    "anthropic",
    "instructor",
    "langchain_anthropic",
    "langchain_openai",
    "litellm",
    "llama_index.llms.openai_like",
    "ollama",
    "openai",
    "pydantic_ai",
)


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # not even the package around it
        return False


_INSTALLED = all(map(_is_installed, _PACKAGES))
collect_ignore_glob = [] if _INSTALLED else ["test_*.py"]

# Read when litellm, langsmith, pydantic-ai and openai-agents are imported: none of them is to call home.
os.environ.update(
    LITELLM_LOCAL_MODEL_COST_MAP="True",
    LITELLM_TELEMETRY="False",
    LANGSMITH_TRACING="false",
    DO_NOT_TRACK="1",
    OPENAI_AGENTS_DISABLE_TRACING="1",
)

if _INSTALLED:
    from clients_kit import ServedModel, serve_model

    @pytest.fixture(scope="session")
    def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
        with serve_model(tmp_path_factory.mktemp("served") / "keys.json") as served:
            yield served

    @pytest.fixture(scope="session")
    def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
        """The same model, whose answers may begin with reasoning."""
        keys = tmp_path_factory.mktemp("thinking") / "keys.json"
        with serve_model(keys, "chat.reasoning=on") as served:
            yield served
