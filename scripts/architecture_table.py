"""Write the table of architectures in docs/backends.md, between its two markers: what the tests' models need.

    python scripts/architecture_table.py [--check]

With --check nothing is written, and the exit code is 1 if the table is out of date.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from page_table import update_page

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "src"), str(ROOT / "tests" / "kits")]

from architecture_kit import TINY, write_tiny  # noqa: E402
from cllm.models.architectures import ARCHITECTURES  # noqa: E402
from cllm.models.features import FEATURES, features_of  # noqa: E402
from cllm.models.gguf import GGUFModel  # noqa: E402
from cllm.models.gguf_decoder import decoder_spec  # noqa: E402

PAGE = ROOT / "docs" / "backends.md"
BEGIN = "<!-- architectures: written by scripts/architecture_table.py -->"
END = "<!-- end of architectures -->"


def table() -> str:
    needed: dict[str, set[str]] = {name: set() for name in ARCHITECTURES}
    with tempfile.TemporaryDirectory() as directory:
        for tiny in TINY.values():
            model = GGUFModel.open(write_tiny(Path(directory, "tiny.gguf"), tiny))
            needed[tiny.architecture].update(features_of(decoder_spec(model)))
    rows = (
        f"| `{name}` | {each.models} | {', '.join(found for found in FEATURES if found in needed[name])} |\n"
        for name, each in ARCHITECTURES.items()
    )
    return "| architecture | models | beyond a plain decoder, if it asks for it |\n|---|---|---|\n" + "".join(rows)


if __name__ == "__main__":
    raise SystemExit(update_page(PAGE, BEGIN, END, table(), __doc__))
