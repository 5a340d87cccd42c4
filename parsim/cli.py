"""The command line. Exit status 0; 1 for a user's error, with one message; 2 for wrong usage; 130 for Ctrl-C. Where it is asked
whether a training fits, 3 says that it does not, and 4 that it is uncertain.

Every command takes --json: one document on stdout, nothing else; progress goes to stderr.
"""

from __future__ import annotations

import errno
import functools
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from parsim import __version__
from parsim.commands.agent import mcp
from parsim.commands.ask import check, cost, plan, simulate
from parsim.commands.files import export, import_command
from parsim.commands.machine import calibrate, doctor, models, profile
from parsim.commands.run import coverage, demo, history, report, run, validate
from parsim.commands.sweep import bench_graphs, compare, explore, sweep
from parsim.errors import ParsimError
from parsim.execute.processes.launch import signals_as_exit
from parsim.files import FULL
from parsim.units import printable

COMMANDS: Mapping[str, Callable[..., None]] = {
    "doctor": doctor,
    "calibrate": calibrate,
    "profile": profile,
    "models": models,
    "import": import_command,
    "cost": cost,
    "plan": plan,
    "check": check,
    "simulate": simulate,
    "sweep": sweep,
    "explore": explore,
    "compare": compare,
    "bench-graphs": bench_graphs,
    "run": run,
    "validate": validate,
    "coverage": coverage,
    "history": history,
    "report": report,
    "export": export,
    "demo": demo,
    "mcp": mcp,
}


NO_SERVING = "parsim is about training: serving and inference are out of its scope"
ELSEWHERE = {
    **dict.fromkeys(("serve", "infer", "inference", "generate", "chat"), NO_SERVING),
    "train": "`parsim run` trains on this machine, and `parsim export` writes launch files for another one",
    "explain": "`parsim plan MODEL --gpus COUNTxGPU --explain` says where every millisecond comes from",
    **dict.fromkeys(("estimate", "predict", "memory"), "`parsim check` says whether a training fits and how fast it is"),
}
"""What there is in place of commands that people try."""


KEYS = {
    "--precision": "training.precision=bf16",
    "--dtype": "training.precision=bf16",
    "--optimizer": "training.optimizer=adamw",
    "--tp": "plan.mesh.tp=8",
    "--pp": "plan.mesh.pp=2",
    "--zero": "plan.zero_stage=3",
    "--microbatches": "plan.microbatches=4",
    "--recompute": "plan.recompute=full",
}
"""Options that people try: the key of a run file that says the same."""


class Command(TyperCommand):
    """A command, and a line for those of KEYS."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        for word in args if self.name in ("plan", "check", "simulate", "sweep") else ():
            option = word.partition("=")[0]
            if option in KEYS:
                ctx.fail(f"{option} is a key: write --set {KEYS[option]}")
        return super().parse_args(ctx, args)


class Commands(TyperGroup):
    """The commands, and a line for those of ELSEWHERE."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and (text := ELSEWHERE.get(args[0])):
            ctx.fail(text)
        return super().resolve_command(ctx, args)


def build() -> typer.Typer:
    """The application with every command of COMMANDS."""
    app = typer.Typer(
        name="parsim",
        cls=Commands,
        help="Predict the fastest way to train a model on a cluster, its step time, and whether it fits in memory.",
        epilog="The Tab key completes commands, models and GPUs after `parsim --install-completion`, in a new shell.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for name, function in COMMANDS.items():
        app.command(name, cls=Command)(_endings_told(name, function))
    return app


def _endings_told(name: str, command: Callable[..., None]) -> Callable[..., None]:
    """The command, which says in one line that a signal ended it, unless what it did has said so (a note of the exception)."""

    @functools.wraps(command)
    def told(*arguments: object, **options: object) -> None:
        with signals_as_exit():
            try:
                command(*arguments, **options)
            except (KeyboardInterrupt, SystemExit) as ending:
                status = 128 + signal.SIGINT if isinstance(ending, KeyboardInterrupt) else ending.code
                number = status - 128 if isinstance(status, int) else 0
                if number not in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    raise
                if not getattr(ending, "__notes__", ()):
                    text = f"ended by {signal.Signals(number).name} before `parsim {name}` had a result"
                    print(f"parsim: {text}; nothing is left running. Give the same command again", file=sys.stderr, flush=True)
                raise SystemExit(128 + number) from None

    return told


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"parsim {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Options that come before the command."""


def main() -> None:
    """Entry point of the `parsim` script."""
    try:
        build()()
    except ParsimError as error:
        print(f"parsim: {printable(str(error))}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        # A file that cannot be read or written is the user's to mend; anything else is a fault of parsim: traceback.
        if isinstance(error, BrokenPipeError):  # nobody reads our output any more, as in `parsim plan ... | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(128 + signal.SIGPIPE)
        if error.filename is None and error.errno not in (*FULL, errno.EROFS, errno.EIO):
            raise  # a write to a disk that takes no more does not name its file
        where = "" if error.filename is None else f": {error.filename}"
        print(f"parsim: {printable(f'{error.strerror}{where}')}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
