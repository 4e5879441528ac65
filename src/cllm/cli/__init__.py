"""The `cllm` command. Each subcommand imports what it needs when it runs, so that --help is fast."""

from __future__ import annotations

import errno
import io
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from cllm.cli import stdio
from cllm.cli.cache import app as cache_commands
from cllm.cli.chat.command import chat
from cllm.cli.cluster import app as cluster_commands
from cllm.cli.command_list import CommandList
from cllm.cli.config import app as config_commands
from cllm.cli.export_tokenizer import export_tokenizer
from cllm.cli.generate import generate
from cllm.cli.keys import app as key_commands
from cllm.cli.models import models
from cllm.cli.out_of_memory import NO_MEMORY, is_out_of_memory
from cllm.cli.pull import pull
from cllm.cli.serve import serve
from cllm.errors import CLLMError
from cllm_bench.simulate.cli import app as simulate_commands

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SIGNALLED = 128
"""Exit codes above this one mean: ended by a signal."""


class Commands(CommandList):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The many commands of `bench` are imported where they are used or completed, not for a list of commands."""
        name, command, rest = super().resolve_command(ctx, args)
        if name == "bench":
            from cllm_bench.cli import app as bench_commands

            command = typer.main.get_command(bench_commands)
        return name, command, rest


app = typer.Typer(
    name="cllm",
    cls=Commands,
    help="An LLM inference server built around its KV cache.",
    epilog="Exit codes: 0: success; 2: fix your input; 1: an unexpected error, or a benchmark that failed.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help is shorter, and twice as fast
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(serve)
app.command()(chat)
app.command()(generate)
app.command()(pull)
app.command()(models)
app.command()(export_tokenizer)

app.add_typer(cluster_commands, name="cluster")
app.add_typer(config_commands, name="config")
app.add_typer(key_commands, name="keys")
app.add_typer(cache_commands, name="cache")
app.add_typer(simulate_commands, name="simulate")


@app.command()
def bench() -> None:
    """Benchmark cLLM against other servers on this machine."""


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"cllm {version('cllm')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit. 0: success; 2: the user has to fix something (one line says what); 1: an unexpected
    error, or a benchmark that failed; 128 + N: ended by signal N.

    The code is also 1, without a message, if the reader of stdout went away, as in `cllm config show | head -1`.
    """
    stdio.open_closed()
    signal.signal(signal.SIGTERM, _leave)
    _use_utf8()
    code = _finish(_run(args))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is left to be done, so nothing to interrupt
    sys.exit(code)


def _run(args: Sequence[str] | None) -> int:
    """Turn every exception into an exit code and one line on stderr."""
    try:
        signal.signal(signal.SIGINT, _interrupt)
        app(args=args, prog_name="cllm")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except CLLMError as error:
        return _report(str(error), error, 2)
    except KeyboardInterrupt:  # before click started, which turns it into a SystemExit
        return _SIGNALLED + signal.SIGINT
    except BrokenPipeError:
        return 1
    except Exception as error:
        if _is_interrupt(error):
            return _SIGNALLED + signal.SIGINT
        if is_out_of_memory(error):
            return _report(NO_MEMORY, error, 2)
        if isinstance(error, OSError) and error.errno in _DISK_FULL:
            target = error.filename or "the output"
            return _report(f"cannot write {target}: {error.strerror}", error, 2)
        hint = "" if _debugging() else " (set CLLM_LOG__LEVEL=debug for a traceback)"
        return _report(f"unexpected {type(error).__name__}: {error}{hint}", error, 1)
    return 0


def _finish(code: int) -> int:
    """Flush stdout. After a signal do not wait for a reader; a signal also ends the waiting."""
    try:
        if code > _SIGNALLED:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            stdio.discard_unread()
        sys.stdout.flush()
        return code
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except KeyboardInterrupt:
        code = _SIGNALLED + signal.SIGINT
    except BrokenPipeError:
        code = code or 1
    except OSError as error:
        code = code or _report(f"cannot write the output: {error.strerror}", error, 2)
        stdio.discard(1)
    stdio.discard_unread()
    return code


def _use_utf8() -> None:
    """Whatever the locale: read prompts as UTF-8 or refuse them, and never fail to print an answer."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _leave(signum: int, frame: FrameType | None) -> NoReturn:
    """Turn the signal into an exception, so that open files and sockets are closed."""
    sys.exit(_SIGNALLED + signum)


def _interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    """The same as Python's own handler, which asyncio would replace; it would then wait for a print that is stuck."""
    raise KeyboardInterrupt


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether Ctrl-C is behind it: pydantic, interrupted while it builds a model, makes an error of its own of that."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        if KeyboardInterrupt.__name__ in str(error):
            return True
        error = error.__cause__ or error.__context__
    return error is not None


def _debugging() -> bool:
    return os.environ.get("CLLM_LOG__LEVEL") == "debug" or logging.getLogger("cllm").isEnabledFor(logging.DEBUG)


def _report(message: str, error: Exception, code: int) -> int:
    with suppress(OSError):  # stderr may be closed
        if _debugging():
            import traceback

            traceback.print_exception(error)
        typer.echo(f"cllm: {' '.join(message.split())}", err=True)
    return code
