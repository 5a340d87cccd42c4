"""Every error that a user can cause, as one tree; each message has the rule, the values and the fix.

ParsimError                 exit status 1: one clear message, no traceback
├── ConfigError             a key or value of RUN.toml or of the command line
├── ModelError              an unknown or malformed model
│   ├── TraceError          a module that cannot be cut into runnable components
│   └── FactoryError        the user's own factory raised; the message ends with the traceback of that code
├── ProfileError            an unknown, broken or incomplete hardware profile
├── PlanError               a mesh, stage or batch that contradicts itself
├── GraphError              a task graph that cannot be run
│   └── DeadlockError       issue orders that wait for one another
├── CostError               a piece of work without a known cost
├── ScenarioError           conditions or a whole run that contradict themselves, the plan or the cluster
│   └── StandstillError     a link that is down stops a step forever
├── ScheduleError           nothing to choose from
├── AlgorithmError          a mixing matrix, merge, period or delay that contradicts itself or its data
├── DataError               a dataset that is missing or contradicts its description
│   └── NoSplitError        a dataset without the requested split
├── ImportedFileError       a file of another tool without content that parsim can use
├── DoesNotFitError         `run` of a plan whose memory exceeds a device
├── ExecutionError          a real run that failed (a rank died, a process would not start)
│   ├── OutOfMemoryError    a rank could not allocate the memory that it needs
│   ├── RankLostError       a rank died, hangs, or lost its device; it says which
│   └── DivergedError       a loss or a weight is not finite any more
└── MissingDependencyError  a package that this command needs
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterable, Sequence
from typing import ClassVar

from parsim.units import printable

LONGEST_MESSAGE = 600
"""Letters of a message that quotes what somebody wrote: it says rule, value and fix, however long the value is."""


class ParsimError(Exception):
    """Base of all errors that are reported to the user as one message, in which a terminal obeys nothing.

    Attributes: longest: a longer message loses its middle; 0: none does.
    """

    longest: ClassVar[int] = 0

    def __str__(self) -> str:
        text = printable(super().__str__())
        if not self.longest or len(text) <= self.longest:
            return text
        end = self.longest // 3
        return f"{text[: self.longest - end - len(_CUT)]}{_CUT}{text[-end:]}"


_CUT = " [...] "


class ConfigError(ParsimError):
    """A key or value of a run file or of the command line is wrong."""

    longest = LONGEST_MESSAGE


class ModelError(ParsimError):
    """A model is unknown or malformed."""

    longest = LONGEST_MESSAGE


class TraceError(ModelError):
    """A module cannot be cut into runnable components."""

    longest = 0


class FactoryError(ModelError):
    """The user's own factory raised; the message ends with the traceback of that code alone."""

    longest = 0


class ProfileError(ParsimError):
    """A hardware profile is unknown, broken or incomplete."""

    longest = LONGEST_MESSAGE


class PlanError(ParsimError):
    """A plan contradicts itself, its model or its cluster."""

    longest = LONGEST_MESSAGE


class GraphError(ParsimError):
    """A task graph cannot be run."""


class DeadlockError(GraphError):
    """The issue orders of the resources wait for one another."""


class CostError(ParsimError):
    """No cost is known for a piece of work."""

    longest = LONGEST_MESSAGE


class ScenarioError(ParsimError):
    """A scenario contradicts itself, the plan or the cluster."""

    longest = LONGEST_MESSAGE


class StandstillError(ScenarioError):
    """A step never ends, since a link that it needs is down."""


class ScheduleError(ParsimError):
    """The scheduler has nothing to choose from."""


class AlgorithmError(ParsimError):
    """A rule of synchronisation contradicts itself, its workers or its data."""

    longest = LONGEST_MESSAGE


class DataError(ParsimError):
    """A dataset is missing or contradicts its description."""

    longest = LONGEST_MESSAGE


class NoSplitError(DataError):
    """A dataset has no such split (test, validation)."""


class ImportedFileError(ParsimError):
    """A file of another tool is damaged, of an unknown kind, or holds nothing that can be imported."""

    longest = LONGEST_MESSAGE


class DoesNotFitError(ParsimError):
    """A plan needs more memory than a device has."""


class ExecutionError(ParsimError):
    """A real run failed."""


class OutOfMemoryError(ExecutionError):
    """A rank of a real run could not allocate the memory that it needs."""


class RankLostError(ExecutionError):
    """Ranks of a real run died, hang or raised an exception that is not one of parsim's own.
    `ranks`: their numbers. `device_lost`: their device no longer answers. `raised`: their code raised, and may do so again."""

    def __init__(self, text: str, ranks: Iterable[int] = (), *, device_lost: bool = False, raised: bool = False) -> None:
        super().__init__(text)
        self.ranks, self.device_lost, self.raised = tuple(ranks), device_lost, raised

    def with_text(self, text: str) -> RankLostError:
        """This error with another message."""
        return RankLostError(text, self.ranks, device_lost=self.device_lost, raised=self.raised)


class DivergedError(ExecutionError):
    """Training has diverged: a loss or a weight is no longer finite."""


class MissingDependencyError(ParsimError):
    """A package is needed that is not installed, or cannot be imported."""


EXTRA_OF = {
    "cvxpy": "solvers",
    "lightning": "lightning",
    "mcp": "mcp",
    "mlflow": "mlflow",
    "numba": "fast",
    "plotly": "pages",
    "scipy": "solvers",
    "tensorboard": "tensorboard",
    "torch": "torch",
    "trackio": "trackio",
    "transformers": "hf",
    "wandb": "wandb",
}
"""Packages that a question may need, and the extra of pyproject.toml that brings each."""


def require(package: str, purpose: str) -> None:
    """Raises MissingDependencyError, which names the extra, unless the package is installed."""
    if importlib.util.find_spec(package) is None:
        extra = f"parsim[{EXTRA_OF[package]}]"
        raise MissingDependencyError(f"{purpose} needs {package}, which is not installed; pip install '{extra}'")


AS_LIKELY = 0.15
"""Words that are less like the given one than the closest by more than this are not what was meant."""


def first_few(names: Sequence[str], most: int = 3) -> str:
    """Up to `most` of the names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def near_matches(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean a or b?" for the known words closest to `word`, or the list of all of them."""
    options = sorted(known)
    close = difflib.get_close_matches(word, options, n=3, cutoff=0.5)
    if close:
        likeness = [difflib.SequenceMatcher(None, option, word).ratio() for option in close]
        close = [option for option, like in zip(close, likeness, strict=True) if like >= likeness[0] - AS_LIKELY]
        return f"; did you mean {' or '.join(close)}?"
    return f"; known: {', '.join(options)}" if options else ""
