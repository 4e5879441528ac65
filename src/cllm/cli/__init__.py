"""The command `cllm`. What a command needs is imported when it runs, so that --help answers at once."""

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
from typing import Annotated, NoReturn

import typer

from cllm.cli import standard
from cllm.cli.cache import cache_commands
from cllm.cli.chat import chat
from cllm.cli.export_tokenizer import export_tokenizer
from cllm.cli.generate import generate
from cllm.cli.keys import app as key_commands
from cllm.cli.memory import NO_MEMORY, is_out_of_memory
from cllm.cli.models import models
from cllm.cli.pull import pull
from cllm.cli.serve import serve
from cllm.cli.settings import check, show
from cllm.errors import CLLMError
from cllm.simulate.cli import app as simulate_commands

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SIGNALLED = 128
"""An exit code above it is that of a signal."""

app = typer.Typer(
    name="cllm",
    help="Serve and use language models, with a KV cache that is managed well.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help is shorter, and there in half the time
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(serve)
app.command()(chat)
app.command()(generate)
app.command()(pull)
app.command()(models)
app.command()(export_tokenizer)

config_commands = typer.Typer(help="Show or check the configuration.", no_args_is_help=True, rich_markup_mode=None)
config_commands.command()(show)
config_commands.command()(check)
app.add_typer(config_commands, name="config")
app.add_typer(key_commands, name="keys")
app.add_typer(cache_commands, name="cache")
app.add_typer(simulate_commands, name="simulate")


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
)
def bench(context: typer.Context) -> None:
    """Measure cLLM and its peers on this machine."""
    from cllm.bench.cli import app as bench_app

    bench_app(args=context.args, prog_name="cllm bench")


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
    """Run a command and exit: 0 is well, 2 is the caller's to mend (one line says what), 1 is ours.

    1 is also, without a word, that nobody reads what is printed, as in `cllm config show | head -1`.
    """
    standard.open_missing()
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, _interrupt)
    _use_utf8()
    sys.exit(_finish(_run(args)))


def _run(args: Sequence[str] | None) -> int:
    """The exit code; every exception has become one, and a line."""
    try:
        app(args=args, prog_name="cllm")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except CLLMError as error:
        return _report(str(error), error, 2)
    except KeyboardInterrupt:  # before click, which turns it into a SystemExit, has begun
        return _SIGNALLED + signal.SIGINT
    except BrokenPipeError:
        return 1
    except Exception as error:
        if is_out_of_memory(error):
            return _report(NO_MEMORY, error, 2)
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            where = error.filename or "what was to be printed"
            return _report(f"cannot write {where}: {error.strerror}", error, 2)
        hint = "" if _debugging() else " (CLLM_LOG__LEVEL=debug shows where)"
        return _report(f"unexpected {type(error).__name__}: {error}{hint}", error, 1)
    return 0


def _finish(code: int) -> int:
    """Write what is still in Python's buffers. After a signal nobody is waited for, and a signal ends the waiting."""
    try:
        if code > _SIGNALLED:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            standard.let_go()
        sys.stdout.flush()
        return code
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except KeyboardInterrupt:
        code = _SIGNALLED + signal.SIGINT
    except BrokenPipeError:
        code = code or 1
    except OSError as error:
        code = code or _report(f"cannot write what was to be printed: {error.strerror}", error, 2)
        standard.discard(1)
    standard.let_go()
    return code


def _use_utf8() -> None:
    """Whatever the locale says: prompts are UTF-8 or refused, and no answer fails to print."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _leave(signum: int, frame: FrameType | None) -> NoReturn:
    """Turn the signal into an exception, so that whatever is open is closed."""
    sys.exit(_SIGNALLED + signum)


def _interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    """What Python's own handler does. But asyncio replaces that one, and then waits for a print that is stuck."""
    raise KeyboardInterrupt


def _debugging() -> bool:
    return os.environ.get("CLLM_LOG__LEVEL") == "debug" or logging.getLogger("cllm").isEnabledFor(logging.DEBUG)


def _report(message: str, error: Exception, code: int) -> int:
    with suppress(OSError):  # nobody may be there to read it
        if _debugging():
            import traceback

            traceback.print_exception(error)
        typer.echo(f"cllm: {' '.join(message.split())}", err=True)
    return code
