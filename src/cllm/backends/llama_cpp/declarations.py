"""llama.h, as much of it as we call: types, constants and functions.

The structs of parameters, whose fields differ between versions, are in layouts.py.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int8, c_int32, c_size_t, c_uint8, c_uint32, c_void_p
from typing import Any

llama_token = c_int32
llama_pos = c_int32
llama_seq_id = c_int32

llama_log_callback = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)
ggml_abort_callback = ctypes.CFUNCTYPE(c_bool, c_void_p)


class llama_batch(ctypes.Structure):  # noqa: N801  # its name in llama.h
    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(llama_token)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(llama_pos)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(llama_seq_id))),
        ("logits", POINTER(c_int8)),
    )


CONSTANTS = {
    "GGML_TYPE_F32": 0,
    "GGML_TYPE_F16": 1,
    "GGML_TYPE_Q4_0": 2,
    "GGML_TYPE_Q8_0": 8,
    "LLAMA_FLASH_ATTN_TYPE_AUTO": -1,
    "LLAMA_FLASH_ATTN_TYPE_DISABLED": 0,
    "LLAMA_FLASH_ATTN_TYPE_ENABLED": 1,
    "LLAMA_STATE_SEQ_FLAGS_NONE": 0,
    "LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY": 1,
    "LLAMA_LOAD_MODE_NONE": 0,
    "LLAMA_LOAD_MODE_MMAP": 1,
    "LLAMA_LOAD_MODE_MLOCK": 2,
    "LLAMA_POOLING_TYPE_UNSPECIFIED": -1,
    "LLAMA_POOLING_TYPE_NONE": 0,
    "LLAMA_POOLING_TYPE_MEAN": 1,
    "LLAMA_POOLING_TYPE_CLS": 2,
    "LLAMA_POOLING_TYPE_LAST": 3,
    "LLAMA_POOLING_TYPE_RANK": 4,
    "LLAMA_ATTENTION_TYPE_CAUSAL": 0,
    "LLAMA_ATTENTION_TYPE_NON_CAUSAL": 1,
}

MAX_SEQUENCES = 256
"""LLAMA_MAX_SEQ, which `llama_max_parallel_sequences` returns where it is exported."""

_MODEL = _CONTEXT = _MEMORY = _VOCAB = c_void_p
_FLOATS = POINTER(c_float)
_BYTES = POINTER(c_uint8)
_TOKENS = POINTER(llama_token)

FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    # name: (result, arguments)
    "llama_backend_init": (None, []),
    "llama_log_set": (None, [llama_log_callback, c_void_p]),
    "llama_print_system_info": (c_char_p, []),
    # models
    "llama_model_free": (None, [_MODEL]),
    "llama_model_get_vocab": (_VOCAB, [_MODEL]),
    "llama_model_meta_val_str": (c_int32, [_MODEL, c_char_p, c_char_p, c_size_t]),
    "llama_model_n_ctx_train": (c_int32, [_MODEL]),
    "llama_model_n_embd": (c_int32, [_MODEL]),
    "llama_model_n_embd_out": (c_int32, [_MODEL]),
    "llama_model_n_layer": (c_int32, [_MODEL]),
    "llama_model_n_swa": (c_int32, [_MODEL]),
    "llama_model_n_head": (c_int32, [_MODEL]),
    "llama_model_n_head_kv": (c_int32, [_MODEL]),
    "llama_model_n_cls_out": (c_uint32, [_MODEL]),
    "llama_model_cls_label": (c_char_p, [_MODEL, c_uint32]),
    "llama_model_has_encoder": (c_bool, [_MODEL]),
    "llama_model_has_decoder": (c_bool, [_MODEL]),
    "llama_model_is_recurrent": (c_bool, [_MODEL]),
    "llama_model_is_hybrid": (c_bool, [_MODEL]),
    # vocabularies
    "llama_vocab_n_tokens": (c_int32, [_VOCAB]),
    "llama_vocab_bos": (llama_token, [_VOCAB]),
    "llama_vocab_is_eog": (c_bool, [_VOCAB, llama_token]),
    "llama_tokenize": (c_int32, [_VOCAB, c_char_p, c_int32, _TOKENS, c_int32, c_bool, c_bool]),
    "llama_token_to_piece": (c_int32, [_VOCAB, llama_token, c_char_p, c_int32, c_int32, c_bool]),
    # contexts
    "llama_free": (None, [_CONTEXT]),
    "llama_n_ctx": (c_uint32, [_CONTEXT]),
    "llama_n_ctx_seq": (c_uint32, [_CONTEXT]),
    "llama_n_batch": (c_uint32, [_CONTEXT]),
    "llama_n_ubatch": (c_uint32, [_CONTEXT]),
    "llama_n_seq_max": (c_uint32, [_CONTEXT]),
    "llama_n_threads": (c_int32, [_CONTEXT]),
    "llama_pooling_type": (c_int, [_CONTEXT]),
    "llama_set_abort_callback": (None, [_CONTEXT, ggml_abort_callback, c_void_p]),
    "llama_set_embeddings": (None, [_CONTEXT, c_bool]),
    "llama_set_causal_attn": (None, [_CONTEXT, c_bool]),
    "llama_batch_init": (llama_batch, [c_int32, c_int32, c_int32]),
    "llama_batch_get_one": (llama_batch, [_TOKENS, c_int32]),
    "llama_batch_free": (None, [llama_batch]),
    "llama_encode": (c_int32, [_CONTEXT, llama_batch]),
    "llama_decode": (c_int32, [_CONTEXT, llama_batch]),
    "llama_get_logits": (_FLOATS, [_CONTEXT]),
    "llama_get_logits_ith": (_FLOATS, [_CONTEXT, c_int32]),
    "llama_get_embeddings": (_FLOATS, [_CONTEXT]),
    "llama_get_embeddings_ith": (_FLOATS, [_CONTEXT, c_int32]),
    "llama_get_embeddings_seq": (_FLOATS, [_CONTEXT, llama_seq_id]),
    # K/V memory
    "llama_get_memory": (_MEMORY, [_CONTEXT]),
    "llama_memory_clear": (None, [_MEMORY, c_bool]),
    "llama_memory_can_shift": (c_bool, [_MEMORY]),
    "llama_memory_seq_rm": (c_bool, [_MEMORY, llama_seq_id, llama_pos, llama_pos]),
    "llama_memory_seq_cp": (None, [_MEMORY, llama_seq_id, llama_seq_id, llama_pos, llama_pos]),
    "llama_memory_seq_add": (None, [_MEMORY, llama_seq_id, llama_pos, llama_pos, llama_pos]),
    "llama_memory_seq_pos_max": (llama_pos, [_MEMORY, llama_seq_id]),
    "llama_memory_seq_pos_min": (llama_pos, [_MEMORY, llama_seq_id]),
    "llama_state_seq_get_size_ext": (c_size_t, [_CONTEXT, llama_seq_id, c_uint32]),
    "llama_state_seq_get_data_ext": (c_size_t, [_CONTEXT, _BYTES, c_size_t, llama_seq_id, c_uint32]),
    "llama_state_seq_set_data_ext": (c_size_t, [_CONTEXT, _BYTES, c_size_t, llama_seq_id, c_uint32]),
    # quantised types
    "ggml_quantize_chunk": (
        c_size_t,
        [c_int, _FLOATS, c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, _FLOATS],
    ),
}
