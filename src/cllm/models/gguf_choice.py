"""Chooses one of a repository's .gguf files, which are often one model in several quantisations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cllm.errors import ModelError

PREFERRED = (
    *("Q4_K_M", "Q4_K_S", "Q4_1", "Q4_0", "Q4_K_L", "Q4_K_XL", "Q4_K", "IQ4_NL", "IQ4_XS", "MXFP4"),
    *("Q5_K_M", "Q5_K_S", "Q5_1", "Q5_0", "Q5_K_L", "Q5_K_XL", "Q5_K", "Q6_K", "Q6_K_L", "Q6_K_XL", "Q8_0", "Q8_K_XL"),
    *("Q3_K_XL", "Q3_K_L", "Q3_K_M", "Q3_K_S", "Q3_K", "IQ3_M", "IQ3_S", "IQ3_XS", "IQ3_XXS"),
    *("Q2_K_XL", "Q2_K_L", "Q2_K", "Q2_K_S", "IQ2_M", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S"),
    *("BF16", "F16", "F32"),
)
"""The best compromise between size and quality first."""
_QUANTISATION = re.compile(
    r"(?:^|[-._])((?:I?Q\d(?:_[01]|_K(?:_(?:XL|[LMS]))?|_XXS|_XS|_NL|_[MS])?)|BF16|F16|F32|MXFP4)(?=[-._]|$)", re.I
)
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_NO_MODEL = re.compile(r"(?:^|[-._/])(?:mmproj|imatrix)", re.I)
_ROOM = 1.1
"""Memory that a model needs in addition to its weights, at least: a little K/V."""
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class GGUFFile:
    name: str
    """Its path in the repository; for a model in parts, that of the first part."""
    size: int | None
    """The size of all parts; None if the hub does not report it."""
    quantisation: str | None
    parts: int = 1

    def __str__(self) -> str:
        size = "" if self.size is None else f" ({self.size / _MIB:,.0f} MiB)"
        return f"{self.name}{size}" + (f", in {self.parts} parts" if self.parts > 1 else "")


@dataclass(frozen=True, slots=True)
class Choice:
    """The files of a repository, and the chosen one."""

    files: tuple[GGUFFile, ...]
    chosen: GGUFFile
    why: str


def gguf_files(files: Mapping[str, int | None]) -> tuple[GGUFFile, ...]:
    """The models among the files of a repository, smallest first."""
    found: dict[str, GGUFFile] = {}
    for name, size in files.items():
        if not name.endswith(".gguf") or _NO_MODEL.search(name):
            continue
        part = _PART.search(name)
        whole = name[: part.start()] if part else name
        other = found.get(whole)
        sizes = (size, other.size) if other else (size, 0)
        total = None if None in sizes else sum(each or 0 for each in sizes)
        first = min(name, other.name) if other else name
        found[whole] = GGUFFile(first, total, quantisation_of(name), int(part[2]) if part else 1)
    return tuple(sorted(found.values(), key=lambda each: (each.size or 0, each.name)))


def quantisation_of(name: str) -> str | None:
    """The (last) quantisation in a file name."""
    stem = _PART.sub("", name).removesuffix(".gguf").rpartition("/")[2]
    found = [match[1].upper() for match in _QUANTISATION.finditer(stem)]
    return found[-1] if found else None


def choose(name: str, files: Sequence[GGUFFile], wanted: str | None, memory: int) -> Choice:
    """The file of the quantisation `wanted`; without it, the best one in one part that fits into `memory` bytes."""
    if wanted is not None:
        return _by_quantisation(name, files, wanted)
    whole = [each for each in files if each.parts == 1]
    if not whole:
        raise split_error(name, files[0])
    fitting = [each for each in whole if (each.size or 0) * _ROOM <= memory]
    if not fitting:
        raise ModelError(
            f"{name}: none of its files fits into {memory / _MIB:,.0f} MiB of memory: {_listed(whole)}; to use one "
            f"anyway, name it: {name}:{whole[0].quantisation or 'QUANTISATION'}"
        )
    chosen = min(fitting, key=_rank)
    return Choice(tuple(files), chosen, f"the best that fits into {memory / _MIB:,.0f} MiB of memory")


def _rank(file: GGUFFile) -> tuple[int, int]:
    """Files of unknown quantisation come last, the largest first."""
    known = file.quantisation in PREFERRED
    return (PREFERRED.index(str(file.quantisation)) if known else len(PREFERRED), -(file.size or 0))


def _by_quantisation(name: str, files: Sequence[GGUFFile], wanted: str) -> Choice:
    found = [each for each in files if each.quantisation == wanted.upper()]
    if not found:
        raise ModelError(f"{name}: there is no {wanted}; the repository has {_listed(files)}")
    if len(found) > 1:
        raise ModelError(
            f"{name}: several files are {wanted}: {_listed(found)}; name one: {name.rpartition(':')[0]}/FILE"
        )
    if found[0].parts > 1:
        raise split_error(name, found[0])
    return Choice(tuple(files), found[0], "as requested")


def check_not_split(name: str, file: str) -> None:
    """Refuse a file that is only a part of a model."""
    if part := _PART.search(file):
        raise split_error(name, GGUFFile(file, None, None, int(part[2])))


def split_error(name: str, file: GGUFFile) -> ModelError:
    return ModelError(
        f"{name}: {file.name} is one of {file.parts} parts, but a model must be one file; choose another, or "
        "download all parts and merge them with llama.cpp's `llama-gguf-split --merge`"
    )


def _listed(files: Sequence[GGUFFile]) -> str:
    return ", ".join(map(str, files))
