"""How programs end: scripts that close nothing, forked ones, files that are cut short, and no memory to start with.

Real processes, each of which must end by itself and say what it has to say in one line, or nothing.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from native_kit import write_model
from thorough import exhaustive, slow, some

pytestmark = slow

LIMIT_S = 120
MIB = 1 << 20
FEW = {"resources.kv_cache_max_memory_mb": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


Script = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def script(tmp_path: Path, model: Path) -> Iterator[Script]:
    """Run some lines in a process of their own, with `MODEL`, `LLM` and `SamplingParams` at hand."""

    def run(lines: str) -> subprocess.CompletedProcess[str]:
        head = f"from cllm import LLM, SamplingParams\nMODEL, FEW = {str(model)!r}, {FEW}\n"
        file = tmp_path / "script.py"
        file.write_text(head + textwrap.dedent(lines))
        return subprocess.run(
            [sys.executable, str(file)],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=LIMIT_S,
        )

    yield run


# -- nothing is closed ---------------------------------------------------------------------------------------------

MADE = "llm = LLM(MODEL, settings=FEW); llm.generate('hi', SamplingParams(max_tokens=2))\n"
UNCLOSED = {
    "end": (MADE, 0),
    "exit": (MADE + "import sys; sys.exit(3)", 3),
    "in a function": (f"def work():\n    {MADE}work(); work()", 0),
    "in a reference cycle": (MADE + "llm.me = llm", 0),
    "half a stream": (MADE + "pieces = llm.stream('hi', SamplingParams(max_tokens=4000)); next(pieces)", 0),
    "another backend": ("llm = LLM(backend='fake'); llm.generate('hi')", 0),
    "two": (MADE + MADE.replace("llm", "other"), 0),
    "after use by another thread": (
        MADE + "import threading; threading.Thread(target=lambda: llm.generate('hi')).start()",
        0,
    ),
    "daemon thread": (
        MADE
        + "import threading\n"
        + "begun = threading.Event()\n"
        + "def work():\n"
        + "    for _ in llm.stream('hi', SamplingParams(max_tokens=4000, ignore_eos=True)): begun.set()\n"
        + "threading.Thread(target=work, daemon=True).start()\n"
        + "begun.wait()\n",
        0,
    ),
    "asynchronous": (
        "import asyncio\n"
        "from cllm import AsyncLLM\n"
        "from cllm.config import load_config\n"
        "async def main():\n"
        "    global llm\n"
        "    llm = AsyncLLM(load_config(None, {'model.name': MODEL, **FEW}).config)\n"
        "    await llm.start()\n"
        "    async for _ in llm.submit('hi'): break\n"
        "asyncio.run(main())\n",
        0,
    ),
}


@pytest.mark.parametrize("name", UNCLOSED)
def test_a_script_that_closes_nothing_ends_silently(script: Script, name: str) -> None:
    lines, code = UNCLOSED[name]
    done = script(lines)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_an_exception_is_all_that_is_said(script: Script) -> None:
    done = script(MADE + "raise KeyError('mine')")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback") and done.stderr.endswith("KeyError: 'mine'\n")


def test_an_interactive_session_ends_silently(model: Path) -> None:
    typed = f"from cllm import LLM\nllm = LLM({str(model)!r}, settings={{'resources.kv_cache_max_memory_mb': 8}})\n"
    done = subprocess.run([sys.executable, "-q", "-i"], input=typed, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0
    assert set(done.stderr.split()) <= {">>>"}


def test_threads_and_memory_are_really_given_back(script: Script) -> None:
    done = script(
        MADE
        + "import os, time, cllm.llm\n"
        + "threads = lambda: len(os.listdir('/proc/self/task'))\n"
        + "before, parts = threads(), llm._llm.executor.parts\n"
        + "cllm.llm._release_all()\n"
        + "assert parts.backend._engine is None\n"
        + "assert not llm._llm.executor.engine.alive\n"
        + "until = time.monotonic() + 60\n"  # a thread that was joined is not gone yet
        + "while threads() >= before and time.monotonic() < until: time.sleep(0.01)\n"
        + "print(threads() < before)\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_the_end_is_early_enough_for_those_who_close_then(script: Script) -> None:
    done = script("import atexit\natexit.register(lambda: (llm.generate('hi'), llm.close()))\n" + MADE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_what_comes_after_that_is_refused_and_does_not_hang(script: Script) -> None:
    late = """
        import atexit
        def late():
            try: llm.generate("hi")
            except Exception as error: print(type(error).__name__)
            llm.close()
        atexit.register(late)
        import cllm.llm
        atexit.unregister(cllm.llm._release_all)
        atexit.register(cllm.llm._release_all)  # so that it comes before
        """
    done = script(textwrap.dedent(late) + MADE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ShuttingDownError\n", "")


# -- other processes -----------------------------------------------------------------------------------------------


def test_a_forked_process_says_whose_the_model_is_and_ends(script: Script) -> None:
    done = script(
        MADE
        + "import os, sys, warnings\n"
        + "warnings.simplefilter('ignore', DeprecationWarning)\n"  # of a fork beside threads, since Python 3.12
        + "child = os.fork()\n"
        + "if child == 0:\n"
        + "    for use in (lambda: llm.generate('hi'), lambda: next(llm.stream('hi'))):\n"
        + "        try: use()\n"
        + "        except Exception as error: print(error, flush=True)\n"
        + "    llm.close()\n"
        + "    llm = None\n"
        + "    sys.exit(7)\n"
        + "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        + "print(len(llm.generate('hi', SamplingParams(max_tokens=2))))\n"
    )
    first, second, *rest = done.stdout.splitlines()
    assert first == second
    assert first.startswith("this LLM belongs to process ") and first.endswith("make an LLM in each process")
    assert (done.returncode, rest, done.stderr) == (0, ["7", "1"], "")


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("parent", ["with a model", "without"])
def test_a_model_in_a_process_of_multiprocessing(script: Script, method: str, parent: str) -> None:
    done = script(
        "import multiprocessing\n"
        f"def work():\n    {MADE}"
        "if __name__ == '__main__':\n"
        f"    {MADE if parent == 'with a model' else 'pass'}\n"
        f"    child = multiprocessing.get_context({method!r}).Process(target=work)\n"
        "    child.start(); child.join(); print(child.exitcode)\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


# -- a file that is cut short while it loads -----------------------------------------------------------------------

CUT_WHILE_LOADING = """
    import os, shutil, sys
    FILE = os.path.join(os.path.dirname(MODEL), f"cut-{os.getpid()}.gguf")
    shutil.copy(MODEL, FILE)
    from cllm.backends.native import loader
    load, count = loader._load_tensor, 0
    def load_tensor(*args):
        global count
        count += 1
        if count == 3:
            os.truncate(FILE, 8192)
        return load(*args)
    loader._load_tensor = load_tensor
"""
CHANGED = "changed while it was being loaded (it had "


@pytest.mark.parametrize(
    "command", [["generate", "-m", "FILE", "hi"], ["chat", "-m", "FILE"], ["serve", "FILE", "-p", "0"]]
)
def test_a_file_cut_short_while_it_loads_is_one_line(script: Script, command: list[str]) -> None:
    args = ", ".join("FILE" if word == "FILE" else repr(word) for word in command)
    done = script(textwrap.dedent(CUT_WHILE_LOADING) + f"from cllm.cli import main\nmain([{args}])\n")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = (line for line in done.stderr.splitlines() if " info " not in line)  # serve says what it chose
    assert line.startswith("cllm: ") and CHANGED in line


def test_a_file_cut_short_while_it_loads_is_an_exception_of_ours(script: Script) -> None:
    done = script(
        textwrap.dedent(CUT_WHILE_LOADING)
        + "from cllm.errors import CLLMError\n"
        + "try: LLM(FILE)\n"
        + "except CLLMError as error: print(error)\n"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert CHANGED in done.stdout


def test_a_file_cut_short_before_llama_cpp_loads_it_is_one_line(script: Script) -> None:
    done = script(
        """
        import os, shutil
        from cllm.loading import open_model
        from cllm.cli import main
        FILE = os.path.join(os.path.dirname(MODEL), f"cut-{os.getpid()}.gguf")
        shutil.copy(MODEL, FILE)
        load_tokenizer = open_model.load_tokenizer
        def cut(model):
            os.truncate(FILE, 8192)
            return load_tokenizer(model)
        open_model.load_tokenizer = cut
        main(["generate", "--backend", "llama_cpp", "--model", FILE, "hi"])
        """
    )
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert CHANGED in line


def test_a_mapped_file_cut_short_in_use_is_one_line(script: Script) -> None:
    """As llama.cpp maps it: nothing can be caught there, but something said."""
    done = script(
        """
        import mmap, os
        from cllm.cli.out_of_memory import explain_bus_errors
        explain_bus_errors()
        FILE = os.path.join(os.path.dirname(MODEL), f"mapped-{os.getpid()}")
        with open(FILE, "wb") as file: file.write(bytes(100_000))
        with open(FILE, "rb") as file: mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        os.truncate(FILE, 10)
        mapped[50_000]
        """
    )
    assert done.returncode == 2
    assert done.stderr.startswith("cllm: the model file was truncated") and done.stderr.count("\n") == 1


BACKENDS = {
    "native": (["--backend", "native"], "0"),
    "auto": ([], "0"),
    "llama.cpp": (["--backend", "llama_cpp"], "1"),
    "llama.cpp without mmap": (["--backend", "llama_cpp", "--set", "backend.llama_cpp.mmap=false"], "0"),
}


@pytest.mark.parametrize("case", BACKENDS)
def test_bus_errors_are_explained_only_where_a_file_is_mapped(script: Script, case: str) -> None:
    """Elsewhere such a signal has nothing to do with the model file. /proc knows who catches it."""
    options, caught = BACKENDS[case]
    done = script(
        f"""
        import contextlib, re, signal
        from cllm.cli import main
        with contextlib.suppress(SystemExit):
            main(["generate", "--model", MODEL, "--set", "resources.kv_cache_max_memory_mb=8", *{options}, "hi"])
        caught = int(re.search("SigCgt:(.*)", open("/proc/self/status").read())[1], 16)
        print()
        print("caught:", caught >> signal.SIGBUS - 1 & 1)
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"caught: {caught}"


# -- no address space ----------------------------------------------------------------------------------------------


@exhaustive
@pytest.mark.parametrize("mib", some([60, 120, 200, 280, 360, 440, 520, 700, 1200], 2))
@pytest.mark.parametrize("command", ["generate", "serve"])
def test_too_little_address_space_is_one_line(model: Path, mib: int, command: str) -> None:
    """Each amount ends another part: Python's own, numpy's, the tokenizer's, the weights', the cache's."""
    args = {"generate": ["generate", "hi", "--model", str(model)], "serve": ["serve", str(model), "--port", "0"]}[
        command
    ]
    done = subprocess.run(
        [sys.executable, "-m", "cllm", *args, "--set", "resources.kv_cache_max_memory_mb=4096"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (mib * MIB, mib * MIB)),
    )
    assert done.returncode == 2, done
    lines = [line for line in done.stderr.splitlines() if " warning " not in line and " info " not in line]
    assert len(lines) == 1 and lines[0].startswith("cllm: "), done.stderr
