"""How `llama_model_params` and `llama_context_params` are laid out in the versions of llama.cpp that we know.

llama.cpp changes these structs every few weeks and does not say so at run time. So the layout is found by what
`llama_*_default_params` return: one fits when every field that it names has the value that llama.cpp gives it. A field
that a version appends at the end needs no layout of its own: what the library put there is handed back as it is.
"""

from __future__ import annotations

import ctypes
from ctypes import c_bool, c_float, c_int, c_int32, c_size_t, c_uint32, c_void_p
from dataclasses import dataclass
from typing import Any, NamedTuple

_ROOM = 512
"""Bytes for a struct that may be longer than we know. llama.cpp's own are far shorter."""


class Field(NamedTuple):
    name: str
    type: Any
    default: Any


@dataclass(frozen=True)
class Layout:
    """`fields` in order, in a struct with room behind them."""

    name: str
    fields: tuple[Field, ...]

    def declare(self) -> type[ctypes.Structure]:
        known = [(field.name, field.type) for field in self.fields]
        measured = type("measured", (ctypes.Structure,), {"_fields_": known})
        rest = ("_rest", ctypes.c_uint8 * (_ROOM - ctypes.sizeof(measured)))
        return type(self.name, (ctypes.Structure,), {"_fields_": [*known, rest]})

    def misfit(self, defaults: ctypes.Structure) -> str | None:
        """The first field whose default is not the known one."""
        for field in self.fields:
            found = getattr(defaults, field.name)
            if found != field.default:
                return f"{self.name}.{field.name} is {found}, not {field.default}"
        return None


def _model(*, lazy_mode: bool) -> Layout:
    fields = (
        Field("devices", c_void_p, None),
        Field("tensor_buft_overrides", c_void_p, None),
        Field("n_gpu_layers", c_int32, -1),
        Field("split_mode", c_int, 1),
        Field("load_mode", c_int, -1),
        *([Field("lazy_mode", c_int, 1)] if lazy_mode else []),
        Field("main_gpu", c_int32, 0),
        Field("tensor_split", c_void_p, None),
        Field("progress_callback", c_void_p, None),
        Field("progress_callback_user_data", c_void_p, None),
        Field("kv_overrides", c_void_p, None),
        Field("vocab_only", c_bool, False),
        Field("check_tensors", c_bool, False),
        Field("use_extra_bufts", c_bool, True),
        Field("no_host", c_bool, False),
        Field("no_alloc", c_bool, False),
        Field("load_mtp", c_bool, False),
    )
    return Layout("llama_model_params", fields)


def _context(*, pointer_before_flags: bool) -> Layout:
    fields = (
        Field("n_ctx", c_uint32, 512),
        Field("n_batch", c_uint32, 2048),
        Field("n_ubatch", c_uint32, 512),
        Field("n_seq_max", c_uint32, 1),
        Field("n_rs_seq", c_uint32, 0),
        Field("n_outputs_max", c_uint32, 0),
        Field("n_outputs_max_per_seq", c_uint32, 1),
        Field("n_threads", c_int32, 4),
        Field("n_threads_batch", c_int32, 4),
        Field("ctx_type", c_int, 0),
        Field("rope_scaling_type", c_int, -1),
        Field("pooling_type", c_int, -1),
        Field("attention_type", c_int, -1),
        Field("flash_attn_type", c_int, -1),
        Field("rope_freq_base", c_float, 0.0),
        Field("rope_freq_scale", c_float, 0.0),
        Field("yarn_ext_factor", c_float, -1.0),
        Field("yarn_attn_factor", c_float, -1.0),
        Field("yarn_beta_fast", c_float, -1.0),
        Field("yarn_beta_slow", c_float, -1.0),
        Field("yarn_orig_ctx", c_uint32, 0),
        Field("defrag_thold", c_float, -1.0),
        Field("cb_eval", c_void_p, None),
        Field("cb_eval_user_data", c_void_p, None),
        Field("type_k", c_int, 1),
        Field("type_v", c_int, 1),
        Field("abort_callback", c_void_p, None),
        Field("abort_callback_data", c_void_p, None),
        *([Field("_before_flags", c_void_p, None)] if pointer_before_flags else []),
        Field("embeddings", c_bool, False),
        Field("offload_kqv", c_bool, True),
        Field("no_perf", c_bool, True),
        Field("op_offload", c_bool, True),
        Field("swa_full", c_bool, True),
        Field("kv_unified", c_bool, False),
        Field("samplers", c_void_p, None),
        Field("n_samplers", c_size_t, 0),
        Field("ctx_other", c_void_p, None),
    )
    return Layout("llama_context_params", fields)


# The newest first, with the builds of llama.cpp in which they were seen.
MODEL_LAYOUTS = (
    _model(lazy_mode=True),  # 10809 to 11549
    _model(lazy_mode=False),  # 10566
)
CONTEXT_LAYOUTS = (
    _context(pointer_before_flags=True),  # 11549
    _context(pointer_before_flags=False),  # 10566 to 11063
)


def fitting(layouts: tuple[Layout, ...], default_params: Any) -> type[ctypes.Structure]:
    """The struct that `default_params`, a function of the library, returns. Raises `ValueError` if none is known."""
    misfits = []
    default_params.argtypes = []
    for layout in layouts:
        default_params.restype = declared = layout.declare()
        misfit = layout.misfit(default_params())
        if misfit is None:
            return declared
        misfits.append(misfit)
    raise ValueError(misfits[0])
