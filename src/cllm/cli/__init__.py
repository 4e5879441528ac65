"""The command `cllm`. What a command needs is imported when it runs, so that --help answers at once."""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Annotated, NoReturn

import typer

from cllm.cli.chat import chat
from cllm.cli.generate import generate
from cllm.cli.pull import pull
from cllm.cli.serve import serve
from cllm.cli.settings import check, show
from cllm.errors import CLLMError
from cllm.simulate.cli import app as simulate_commands

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

config_commands = typer.Typer(help="Show or check the configuration.", no_args_is_help=True, rich_markup_mode=None)
config_commands.command()(show)
config_commands.command()(check)
app.add_typer(config_commands, name="config")
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
    """Run a command and exit: 0 is well, 2 is the caller's to mend (one line says what), 1 is ours."""
    signal.signal(signal.SIGTERM, _leave)
    _use_utf8()
    try:
        app(args=args, prog_name="cllm")
    except CLLMError as error:
        _report(str(error), error)
        sys.exit(2)
    except Exception as error:
        hint = "" if _debugging() else " (CLLM_LOG__LEVEL=debug shows where)"
        _report(f"unexpected {type(error).__name__}: {error}{hint}", error)
        sys.exit(1)
    sys.exit(0)


def _use_utf8() -> None:
    """Whatever the locale says: prompts are UTF-8 or refused, and no answer fails to print."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _leave(signum: int, frame: FrameType | None) -> NoReturn:
    """Turn the signal into an exception, so that whatever is open is closed."""
    sys.exit(128 + signum)


def _debugging() -> bool:
    return os.environ.get("CLLM_LOG__LEVEL") == "debug" or logging.getLogger("cllm").isEnabledFor(logging.DEBUG)


def _report(message: str, error: Exception) -> None:
    if _debugging():
        import traceback

        traceback.print_exception(error)
    typer.echo(f"cllm: {' '.join(message.split())}", err=True)
