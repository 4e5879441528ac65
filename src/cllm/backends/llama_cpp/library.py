"""The shared library of llama.cpp, bound twice, and its log.

Long calls go through a binding that releases the GIL. Short ones go through a second binding that keeps it: giving the
GIL up for a getter of 100 ns costs up to a whole switch interval when other threads want it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from cllm.backends.llama_cpp import declarations
from cllm.backends.llama_cpp.discovery import KNOWN, WHEEL, Found, installed, missing_features
from cllm.backends.llama_cpp.layouts import CONTEXT_LAYOUTS, MODEL_LAYOUTS, fitting
from cllm.errors import ModelError
from cllm.machine import install_extra, install_packages

logger = logging.getLogger("cllm.llama_cpp")

_LOG_LEVEL_ERROR = 4  # GGML_LOG_LEVEL_ERROR
_LOG_LEVEL_CONTINUED = 5  # GGML_LOG_LEVEL_CONT: goes on with the line before
_FUNCTION_PREFIX = re.compile(r"^[\w:~]+: ")

# The most telling CPU features, best first, as llama_print_system_info names them.
_CPU_FEATURES = (
    "AMX_INT8",
    "AVX512_VNNI",
    "AVX512",
    "AVX_VNNI",
    "AVX2",
    "AVX",
    "SVE",
    "MATMUL_INT8",
    "DOTPROD",
    "NEON",
)


class Log:
    """Takes llama.cpp's log lines: all go to Python logging as debug, errors are kept for our own messages."""

    def __init__(self) -> None:
        self._line = ""
        self._is_error = False
        self._errors: list[str] = []

    def __call__(self, level: int, text: bytes, _user_data: object) -> None:
        if level != _LOG_LEVEL_CONTINUED:
            self._flush()
            self._is_error = level == _LOG_LEVEL_ERROR
        self._line += text.decode("utf-8", "replace")
        if self._line.endswith("\n"):
            self._flush()

    def clear(self) -> None:
        self._errors.clear()

    def reason(self) -> str:
        """Why the last call failed: llama.cpp's error lines since `clear`, the first one being the cause."""
        return self._errors[0] if self._errors else "llama.cpp gives no reason"

    def _flush(self) -> None:
        line, self._line = " ".join(self._line.split()), ""
        if not line:
            return
        logger.debug(line)
        if self._is_error:
            self._errors.append(_FUNCTION_PREFIX.sub("", line))


class Api:
    """llama.cpp's functions, constants and structs, under their names in llama.h. The functions release the GIL.

    Raises `OSError` if the library does not load, and `ValueError` if it is not as we know it.
    """

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        for name in ("llama_token", "llama_pos", "llama_seq_id", "llama_batch", "llama_log_callback"):
            setattr(self, name, getattr(declarations, name))
        self.ggml_abort_callback = declarations.ggml_abort_callback
        vars(self).update(declarations.CONSTANTS)
        for name, (restype, argtypes) in declarations.FUNCTIONS.items():
            self._bind(name, restype, argtypes)
        self._bind_with_params()
        self._check_batch()

    def __getattr__(self, name: str) -> Any:  # for type checkers: what is there was set above
        raise AttributeError(f"{name} is not declared in declarations.py")

    def _bind(self, name: str, restype: Any, argtypes: list[Any]) -> None:
        function = self._function(name)
        function.restype, function.argtypes = restype, argtypes
        setattr(self, name, function)

    def _function(self, name: str) -> Any:
        try:
            return getattr(self.library, name)
        except AttributeError:
            raise ValueError(f"{name} is missing") from None

    def _bind_with_params(self) -> None:
        """Binds the functions whose structs differ between versions."""
        self.llama_model_default_params = self._function("llama_model_default_params")
        self.llama_context_default_params = self._function("llama_context_default_params")
        model = fitting(MODEL_LAYOUTS, self.llama_model_default_params)
        context = fitting(CONTEXT_LAYOUTS, self.llama_context_default_params)
        self._bind("llama_model_load_from_file", ctypes.c_void_p, [ctypes.c_char_p, model])
        self._bind("llama_init_from_model", ctypes.c_void_p, [ctypes.c_void_p, context])

    def _check_batch(self) -> None:
        batch = self.llama_batch_init(1, 0, 1)
        there = {name: bool(getattr(batch, name)) for name, _ in declarations.llama_batch._fields_}
        if there != dict.fromkeys(there, True) | {"n_tokens": False, "embd": False}:
            raise ValueError(f"llama_batch has {', '.join(name for name in there if there[name])} at first")
        self.llama_batch_free(batch)


class Library:
    """The functions of llama.cpp that we call."""

    def __init__(self, found: Found) -> None:
        self.api: Any = Api(found.path)
        self.package = found.package
        self.version = found.version
        self.log = Log()
        self._log_callback = self.api.llama_log_callback(self.log)  # referenced for as long as llama.cpp may call it
        self.take_log()
        self.api.llama_backend_init()

        # Long calls.
        self.load_model = self.api.llama_model_load_from_file
        self.free_model = self.api.llama_model_free
        self.new_context = self.api.llama_init_from_model
        self.free_context = self.api.llama_free
        self.decode = self.api.llama_decode
        self.state_get = self.api.llama_state_seq_get_data_ext
        self.state_set = self.api.llama_state_seq_set_data_ext

        # Short calls.
        self._keeps_gil = ctypes.PyDLL(str(found.path))
        self.get_logits = self._short("llama_get_logits", restype=ctypes.c_void_p)
        self.get_memory = self._short("llama_get_memory")
        self.position_min = self._short("llama_memory_seq_pos_min")
        self.position_max = self._short("llama_memory_seq_pos_max")
        self.sequence_remove = self._short("llama_memory_seq_rm")
        self.sequence_add = self._short("llama_memory_seq_add")
        self.can_shift = self._short("llama_memory_can_shift")
        self.state_size = self._short("llama_state_seq_get_size_ext")

        self.max_sequences = declarations.MAX_SEQUENCES

    def take_log(self) -> None:
        """There is one log per process, and another user of llama.cpp in it may have taken it."""
        self.api.llama_log_set(self._log_callback, None)

    def _short(self, name: str, restype: Any = None) -> Any:
        function, template = getattr(self._keeps_gil, name), getattr(self.api, name)
        function.argtypes = template.argtypes
        function.restype = restype or template.restype
        return function

    def cpu_feature(self) -> str:
        """The best instruction set that this build of llama.cpp uses here."""
        info = self.api.llama_print_system_info().decode()
        return next((name for name in _CPU_FEATURES if f" {name} = 1" in info), "generic CPU")

    def native_abort_callback(self) -> Any:
        """An abort callback that runs no Python in the compute threads.

        libc's `strlen` has the shape of one: bool (*)(void *data). It says 0, go on, for data "" and 1, abort, for "x".
        """
        libc = ctypes.CDLL("msvcrt" if os.name == "nt" else None)
        return ctypes.cast(libc.strlen, self.api.ggml_abort_callback)


@lru_cache(maxsize=1)
def load_library() -> Library:
    """llama.cpp, loaded at first use: the first that is there and as we know it. Raises `ModelError` if none is."""
    refusals: list[str] = []
    for found in installed():
        library = _open(found)
        if isinstance(library, Library):
            for refusal in refusals:
                logger.warning("%s; using %s", refusal, found)
            return library
        refusals.append(library)
    if refusals:
        raise ModelError("; ".join(refusals))
    raise ModelError(f"the llama_cpp backend needs llama.cpp: {install_packages(WHEEL)}, or {_compile()}")


def _open(found: Found) -> Library | str:
    """The library, or why it is of no use."""
    if missing := missing_features(found):
        return f"{found} does not run on this processor, which has no {', '.join(missing).upper()}; {_compile()}"
    try:
        return Library(found)
    except OSError as error:
        return f"{found} is installed but its library does not load: {error}; {install_packages(WHEEL)}"
    except ValueError as error:
        return f"{found} has an unknown memory layout ({error}); known to work: {KNOWN}; {install_packages(WHEEL)}"


def _compile() -> str:
    return f"compile llama.cpp for this processor: {install_extra('llama-cpp')}"
