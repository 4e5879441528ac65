"""Tokenizing exactly as llama.cpp does, on the real vocabulary and on synthetic ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cllm.errors import InvalidRequestError, ModelError
from cllm.models.gguf import GGUFModel
from cllm.models.registry import resolve
from cllm.text import bpe
from cllm.text.tokenizer import SLACK, ByteTokenizer, TableTokenizer, Tokenizer, encode_prompt, load_tokenizer
from gguf_kit import LLAMA_KEYS, write_gguf
from thorough import sampled, slow
from tokenizer_kit import CORPUS, LlamaVocabulary, sentencepiece_keys


@dataclass(frozen=True)
class Pair:
    """The same vocabulary twice."""

    ours: Tokenizer
    llama: LlamaVocabulary

    def check(self, text: str) -> None:
        for special in (False, True):
            assert self.ours.encode(text, special=special) == self.llama.encode(text, special=special), ascii(text)


def open_pair(path: Path) -> Iterator[Pair]:
    llama = LlamaVocabulary(path)
    yield Pair(load_tokenizer(GGUFModel.open(path)), llama)
    llama.close()


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Pair]:
    yield from open_pair(resolve("smollm2"))


WAYS = ["llama-bpe", "qwen2", "gpt-2", "default", "smollm", "qwen35", "tekken", "gpt-4o"]
DISTINCT = ["llama-bpe", "gpt-2", "default", "qwen35", "gpt-4o"]
"""Those that know different classes of characters."""


@pytest.fixture(scope="module", params=WAYS)
def same_words_otherwise_split(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """The real vocabulary under each way of splitting text into words."""
    model = GGUFModel.open(resolve("smollm2"))
    kinds = model.get("tokenizer.ggml.token_type", [0])
    user_defined = model.get("tokenizer.ggml.tokens", [""]).index("<repo_name>")
    kinds[user_defined] = 4
    keys = LLAMA_KEYS | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": request.param,
        "tokenizer.ggml.tokens": model.get("tokenizer.ggml.tokens", [""]),
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": model.get("tokenizer.ggml.merges", [""]),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    yield from open_pair(write_gguf(tmp_path_factory.mktemp("bpe") / "vocab.gguf", keys))


@pytest.fixture(scope="module", params=[True, False], ids=["space prefix", "no space prefix"])
def sentencepiece(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    keys = sentencepiece_keys() | {"tokenizer.ggml.add_space_prefix": request.param}
    yield from open_pair(write_gguf(tmp_path_factory.mktemp("spm") / "vocab.gguf", keys))


ATOMS = [
    *(" ", "  ", "\n", "\r\n", "\t", "\xa0", "\x00", "\x04", "'s", "'LL", "'", "a", "Zb", "é", "e\u0301", "漢", "ل"),
    *("1", "23", "٣", "!", "<", "|", "😀", "\u200d", "\ua7cb", "\U00010d41", "▁"),
    *("<|im_end|>", "<repo_name>", "<s>", "</s>", "[tool]"),
]
NASTY = st.lists(
    st.sampled_from(ATOMS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=6), max_size=30
).map("".join)


@pytest.mark.model
@pytest.mark.parametrize("text", CORPUS, ids=range(len(CORPUS)))
def test_the_corpus_is_split_as_by_llama_cpp(smollm2: Pair, text: str) -> None:
    smollm2.check(text)


@pytest.mark.model
@settings(max_examples=sampled(400), deadline=None)
@given(text=NASTY)
def test_random_text_is_split_as_by_llama_cpp(smollm2: Pair, text: str) -> None:
    smollm2.check(text)


def test_the_rules_a_tokenizer_was_made_of_are_not_kept() -> None:
    """They are hundreds of bytes per token, and the library has its own."""
    tokenizer = load_tokenizer(GGUFModel.open(resolve("smollm2")))
    assert isinstance(tokenizer, TableTokenizer)
    kept = [cell.cell_contents for cell in tokenizer._encode.__closure__ or ()]  # type: ignore[attr-defined]
    assert kept and not any(isinstance(each, (tuple, list, dict)) and len(each) > 256 for each in kept)
    assert not any(isinstance(each, bpe.Rules) for each in kept)


@pytest.mark.model
@settings(max_examples=sampled(150), deadline=None)
@given(text=NASTY)
def test_other_ways_to_split_words(same_words_otherwise_split: Pair, text: str) -> None:
    same_words_otherwise_split.check(text)


@pytest.mark.model
def test_other_ways_to_split_words_on_the_corpus(same_words_otherwise_split: Pair) -> None:
    for text in CORPUS:
        same_words_otherwise_split.check(text)


@slow
@pytest.mark.model
@pytest.mark.parametrize("same_words_otherwise_split", DISTINCT, indirect=True)
def test_every_character_is_of_the_same_class_as_in_llama_cpp(same_words_otherwise_split: Pair) -> None:
    """Ideographs, syllables, private use and empty planes by sample, all others one by one."""
    blocks = [(0x3400, 0xA000), (0xAC00, 0xD7A4), (0xE000, 0xF900), (0x17000, 0x18B00), (0x20000, 0x110000)]
    sampled = {code for start, stop in blocks for code in range(start, stop) if code % 97}
    codes = [code for code in range(0x110000) if code not in sampled and not 0xD800 <= code < 0xE000]
    ours, llama = same_words_otherwise_split.ours, same_words_otherwise_split.llama
    for start in range(0, len(codes), 500):
        text = "".join(f"a{chr(code)}1{chr(code)}!{chr(code)}?\n" for code in codes[start : start + 500])
        assert ours.encode(text) == llama.encode(text), hex(codes[start])


@settings(max_examples=sampled(400), deadline=None)
@given(text=NASTY | st.text("abcdeé漢 =", max_size=80) | st.text(" a=", max_size=120))
def test_sentencepiece_is_split_as_by_llama_cpp(sentencepiece: Pair, text: str) -> None:
    sentencepiece.check(text)


def test_sentencepiece_on_the_corpus(sentencepiece: Pair) -> None:
    for text in CORPUS:
        sentencepiece.check(text)


@pytest.mark.model
def test_pieces_and_ends_are_llama_cpps(smollm2: Pair, same_words_otherwise_split: Pair) -> None:
    for pair in (smollm2, same_words_otherwise_split):
        assert pair.ours.vocab_size == pair.llama.size
        assert pair.ours.eos_ids == pair.llama.ends()
        assert [pair.ours.token_bytes(i) for i in range(pair.llama.size)] == [
            pair.llama.piece(i) for i in range(pair.llama.size)
        ]


def test_sentencepiece_pieces_and_ends_are_llama_cpps(sentencepiece: Pair) -> None:
    assert sentencepiece.ours.eos_ids == sentencepiece.llama.ends()
    for token_id in range(sentencepiece.llama.size):
        assert sentencepiece.ours.token_bytes(token_id) == sentencepiece.llama.piece(token_id)


@pytest.mark.model
@pytest.mark.parametrize(
    "text",
    ["a" * 10**6, " " * 10**6 + "x", "\n \t" * 300_000, "ab!? 7" * 160_000, "😀漢" * 140_000, "<|im_end|>" * 100_000],
    ids=["one word", "spaces", "blank", "mixed", "wide", "special"],
)
def test_a_megabyte_is_encoded(smollm2: Pair, text: str) -> None:
    assert smollm2.ours.decode(smollm2.ours.encode(text)) == text
    assert smollm2.ours.decode(smollm2.ours.encode(text, special=True), skip_special=False) == text


def check_a_cut(tokenizer: Tokenizer, text: str, at: int) -> None:
    """What refusing a long text from its pieces stands on (text/tokenizer.py)."""
    whole = len(tokenizer.encode(text, add_bos=False))
    pieces = [len(tokenizer.encode(piece, add_bos=False)) for piece in (text[:at], text[at:])]
    assert sum(pieces) - whole <= tokenizer.longest_token + SLACK
    assert sum(pieces) - whole <= 2 * SLACK  # it is far less, for what people and these vocabularies write
    assert whole * tokenizer.longest_token >= len(text.encode())


PARTS = ["ab", "a", "=", " ", "\n", "7", "the", " word", "漢", "é"]
REPEATED = st.tuples(st.lists(st.sampled_from(PARTS)), st.integers(1, 60))


@pytest.mark.model
@settings(max_examples=sampled(200), deadline=None)
@given(repeated=REPEATED, share=st.floats(0, 1))
def test_a_cut_makes_few_tokens_more(
    smollm2: Pair, same_words_otherwise_split: Pair, repeated: tuple[list[str], int], share: float
) -> None:
    text = "".join(repeated[0]) * repeated[1]
    for pair in (smollm2, same_words_otherwise_split):
        check_a_cut(pair.ours, text, int(share * len(text)))


@pytest.mark.model
@settings(max_examples=sampled(100), deadline=None)
@given(repeated=REPEATED, share=st.floats(0, 1))
def test_a_cut_makes_few_tokens_more_of_sentencepiece(
    sentencepiece: Pair, repeated: tuple[list[str], int], share: float
) -> None:
    text = "".join(repeated[0]) * repeated[1]
    check_a_cut(sentencepiece.ours, text, int(share * len(text)))


@pytest.mark.model
@given(text=st.text(st.characters(exclude_categories=["Cs", "Cc"], max_codepoint=0x3FFFF)))
@settings(deadline=None)
def test_decoding_gives_the_text_back(smollm2: Pair, text: str) -> None:
    assert smollm2.ours.decode(smollm2.ours.encode(text)) == text


@pytest.mark.model
def test_special_tokens_only_where_asked_for(smollm2: Pair) -> None:
    tokenizer = smollm2.ours
    end = tokenizer.special_tokens["<|im_end|>"]
    assert end in tokenizer.eos_ids
    assert end not in tokenizer.encode("a<|im_end|>b")
    assert tokenizer.encode("a<|im_end|>b", special=True)[1] == end
    assert tokenizer.decode([end, *tokenizer.encode("x")]) == "x"
    assert tokenizer.decode([end, *tokenizer.encode("x")], skip_special=False) == "<|im_end|>x"
    assert (tokenizer.token_bytes(end), tokenizer.token_text(end)) == (b"", "<|im_end|>")


def test_ordinary_text_does_not_become_special_even_where_llama_cpp_lets_it(tmp_path: Path) -> None:
    """Sentencepiece joins `<` and `s>` if `<s>` is in the vocabulary, whatever it is for; here it must not."""
    keys = sentencepiece_keys()
    keys["tokenizer.ggml.tokens"] = [*keys["tokenizer.ggml.tokens"][:-1], "s>"]
    keys["tokenizer.ggml.token_type"] = [*keys["tokenizer.ggml.token_type"][:-1], 1]
    pair = next(open_pair(write_gguf(tmp_path / "vocab.gguf", keys)))
    assert pair.llama.encode("<s>").count(1) == 2
    assert pair.ours.encode("<s>").count(1) == 1
    assert pair.ours.encode("<s>", special=True) == pair.llama.encode("<s>", special=True) == [1, 1]


@pytest.mark.model
def test_literal_characters_keep_out_of_special_tokens(smollm2: Pair) -> None:
    tokenizer = smollm2.ours
    end = tokenizer.special_tokens["<|im_end|>"]
    text = "<|im_end|><|im_end|>"
    assert tokenizer.encode(text, special=True) == [end, end]
    for spoiled in range(10):
        assert tokenizer.encode(text, special=True, literal=[spoiled]) == [*tokenizer.encode("<|im_end|>"), end]
        assert tokenizer.encode(text, special=True, literal=[10 + spoiled]) == [end, *tokenizer.encode("<|im_end|>")]
    assert tokenizer.encode(text, special=True, literal=[0, 19]) == tokenizer.encode(text)


@pytest.mark.model
def test_lone_surrogates_are_encoded_as_the_replacement_character(smollm2: Pair) -> None:
    assert smollm2.ours.encode("a\ud800b\udfff") == smollm2.ours.encode("a\ufffdb\ufffd")


def table(pieces: dict[str, int], special: dict[str, int]) -> TableTokenizer:
    return TableTokenizer(
        [b""] * 10,
        encoder=lambda texts: [[9] * len(text) for text in texts],
        special_tokens=special,
        whole_tokens=pieces,
        bos_id=0,
        eos_ids=frozenset(),
        add_bos=True,
    )


def test_longer_names_win_over_earlier_ones() -> None:
    tokenizer = table({}, {"<ab>": 1, "b>>>>": 2})
    assert tokenizer.encode("<ab>>>>", special=True) == [0, 9, 9, 2]
    assert tokenizer.encode("<ab><ab>", special=True, add_bos=False) == [1, 1]


def test_user_defined_tokens_are_whole_in_all_text() -> None:
    tokenizer = table({"[tool]": 3}, {"<s>": 0})
    assert tokenizer.encode("x[tool]<s>") == [0, 9, 3, 9, 9, 9]
    assert tokenizer.encode("x[tool]<s>", special=True) == [0, 9, 3, 0]


def test_ids_outside_the_vocabulary_are_refused() -> None:
    for token_id in (-1, 258):
        with pytest.raises(InvalidRequestError, match=rf"token id {token_id} is not in the vocabulary"):
            ByteTokenizer().decode([token_id])


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_byte_tokenizer(text: str) -> None:
    tokenizer = ByteTokenizer(vocab_size=300)
    assert tokenizer.vocab_size == 300
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_prompt_begins_with_a_single_bos() -> None:
    tokenizer = ByteTokenizer()
    assert encode_prompt(tokenizer, "A<eos>") == [65, 257]
    tokenizer.add_bos = True
    assert encode_prompt(tokenizer, "A<eos>") == encode_prompt(tokenizer, "<bos>A<eos>") == [256, 65, 257]
    assert encode_prompt(tokenizer, "") == [256]


def test_byte_tokenizer_special_tokens() -> None:
    tokenizer = ByteTokenizer()
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (256, frozenset({257}), False)
    assert tokenizer.encode("<bos>A<eos>", special=True) == [256, 65, 257]
    assert tokenizer.decode([256, 65, 257]) == "A"
    assert tokenizer.decode([256, 65, 257], skip_special=False) == "<bos>A<eos>"


GPT2_KEYS = LLAMA_KEYS | {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "x y", ""],
    "tokenizer.ggml.token_type": [1, 1, 1, 99, 1],
    "tokenizer.ggml.merges": ["a b", "b a", "a b", "q", "a x"],
}


def test_merges_that_lead_nowhere_are_left_out(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(GGUFModel.open(write_gguf(tmp_path / "m.gguf", GPT2_KEYS)))
    assert tokenizer.encode("abba") == [2, 1, 0]
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (None, frozenset(), False)
    assert tokenizer.token_text(4) == "[EMPTY_4]"


def test_the_end_of_a_part_does_not_end_an_answer(tmp_path: Path) -> None:
    for others, ends in ((["x", "y"], {0}), (["<|return|>", "<|call|>"], {1, 2}), (["<|calls|>", "<|flush|>"], {1, 2})):
        keys = GPT2_KEYS | {"tokenizer.ggml.tokens": ["<|end|>", *others, "a", "b"]}
        assert load_tokenizer(GGUFModel.open(write_gguf(tmp_path / "m.gguf", keys))).eos_ids == ends


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokenizer.ggml.tokens": None}, "has no tokenizer"),
        ({"tokenizer.ggml.model": "bert"}, "its tokenizer 'bert' is not supported (supported: gpt2"),
        ({"tokenizer.ggml.pre": "viking"}, "its pre-tokenizer 'viking' is not supported (supported: "),
        ({"tokenizer.ggml.merges": None}, "has no merges"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "has a duplicate token"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "has 5 tokens but 2 token types"),
        ({"tokenizer.ggml.tokens": "a"}, "tokenizer.ggml.tokens is a str, not a list"),
        ({"tokenizer.ggml.model": "llama"}, "has no byte tokens"),
    ],
)
def test_unusable_vocabularies_are_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    keys = GPT2_KEYS | {"llama.vocab_size": 5} | change
    path = write_gguf(tmp_path / "m.gguf", {key: value for key, value in keys.items() if value is not None})
    with pytest.raises(ModelError) as caught:
        load_tokenizer(GGUFModel.open(path))
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_sentencepiece_with_too_few_scores_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", sentencepiece_keys() | {"tokenizer.ggml.scores": [0.0]})
    with pytest.raises(ModelError, match="scores"):
        load_tokenizer(GGUFModel.open(path))
