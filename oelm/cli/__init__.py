"""The command line: a table of commands, each in a short module that is imported when it is called."""

import importlib
import sys
from collections.abc import Sequence

from oelm.errors import UserError, unknown
from oelm.version import __version__

# command: (module, function, one line of help)
COMMANDS: dict[str, tuple[str, str, str]] = {
    "demo": ("demo", "demo", "prepare the embedded corpus, run a small study, show its verdicts"),
    "methods": ("methods", "methods", "list the methods, with what each trains and freezes"),
    "audit": ("audit", "audit", "prove that what is frozen stays frozen, and the rest trains"),
    "data": ("data", "data", "prepare, list and show datasets"),
    "train": ("train", "train", "train one run"),
    "generate": ("generate", "generate", "stream text from a trained run"),
    "check": ("check", "check", "what a study will cost, and what confounds it"),
    "run": ("run", "run", "run a study: here, on shared GPUs, or on Slurm"),
    "status": ("status", "status", "how far a study's runs are"),
    "logs": ("status", "logs", "show or follow a run's log"),
    "stop": ("run", "stop", "stop a study or a run gracefully"),
    "report": ("report", "report", "decide a study's claims and write its report"),
    "bench": ("bench", "bench", "time the methods' training steps on this machine"),
    "export": ("export", "export", "turn a run into a Hugging Face folder"),
}
ALIASES = {"diagnose": "audit"}


def usage() -> str:
    """The text of `oelm --help`."""
    lines = [
        "usage: oelm COMMAND [OPTIONS]",
        "",
        "Freeze the Query/Key projections of a transformer, train the rest, and find out what that",
        "costs and buys: prepare a corpus, train the arms of a study side by side, audit the freezing,",
        "decide claims that were written beforehand, and read the report.",
        "",
        "commands:",
        *(f"  {name:<10} {row[2]}" for name, row in COMMANDS.items()),
        "",
        "`oelm COMMAND --help` teaches each. `oelm --version` prints the version.",
        "Exit codes: 0 done, 1 the check or run failed, 2 the input is wrong; more in docs/guide.md.",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command; a user's mistake becomes one line on stderr and exit code 2."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage())
        return
    if args[0] in ("-V", "--version"):
        print(f"oelm {__version__}")
        return
    try:
        name = ALIASES.get(args[0], args[0])
        if name not in COMMANDS:
            raise unknown("command", args[0], COMMANDS)
        module, function, _ = COMMANDS[name]
        command = getattr(importlib.import_module(f"oelm.cli.{module}"), function)
        sys.exit(command(args[1:]))
    except UserError as error:
        print(f"oelm: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\noelm: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output, `head` perhaps, has seen enough
        sys.stderr.close()
        sys.exit(0)
