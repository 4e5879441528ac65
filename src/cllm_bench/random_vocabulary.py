"""The vocabulary and the chat template of files with random weights.

A word is one token, with the space before it, and an answer is words: read again, it is the same tokens. So a chat's
next turn is what it is with a real model, whose answers are text.
"""

from __future__ import annotations

from gguf import GGUFWriter

from cllm_bench.prompts import WORDS

END, BEGIN = "<|im_end|>", "<|im_start|>"
_CONTROL = ("<|endoftext|>", END, BEGIN)
_PAIR = "he"
SILENT = len(_CONTROL) + 256 + 1
"""Tokens before the first word."""
TEMPLATE = (
    "{% for message in messages %}"
    f"{BEGIN}{{{{ message['role'] }}}}\n{{{{ message['content'] }}}}{END}\n"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{BEGIN}assistant\n{{% endif %}}"
)


def add_vocabulary(writer: GGUFWriter, n_vocab: int) -> None:
    """Control tokens, the single bytes, a pair of them, then words, as far as there is room."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    spelled = [chr(256 + number) for number in range(256 - len(printable))]
    space = spelled[ord(" ")]
    tokens = [*_CONTROL, *spelled, *map(chr, printable), _PAIR, *(space + word for word in dict.fromkeys(WORDS))][
        :n_vocab
    ]
    tokens += [f"{space}{_word(number)}" for number in range(n_vocab - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")  # which looks up whole words first
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(_CONTROL) + [1] * (n_vocab - len(_CONTROL)))
    writer.add_token_merges([" ".join(_PAIR)])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(_CONTROL.index(END))
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def _word(number: int) -> str:
    """Letters alone, as one number is from another."""
    letters = ""
    for _ in range(5):
        number, digit = divmod(number, 26)
        letters += chr(ord("a") + digit)
    return "q" + letters
