"""Which operators of torch have a CUDA kernel: a list made with a CUDA build, so that a CPU build can check names against it.

`python -m tools.cuda_operators --write` makes the list anew; it needs a CUDA build of torch, and no GPU.
Operators stand with their overloads under the dispatch key that holds their kernel:

    CUDA                       a kernel of its own
    CompositeExplicitAutograd  made of other operators, for every device
    CompositeExplicitAutogradNonFunctional  the same, for operators without a view or an update in place
    CompositeImplicitAutograd  made of other operators, which autograd sees

An operator that is missing runs on no GPU. Leaves out which dtypes and shapes a kernel takes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

from parsim.errors import ConfigError
from parsim.files import write_text_atomically

KEYS = (
    "CUDA",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
    "CompositeImplicitAutograd",
)
LIST_PATH = Path(__file__).with_name("cuda_operators.txt")
NAMESPACE = "aten::"


@cache
def cuda_kernels(path: Path = LIST_PATH) -> Mapping[str, str]:
    """Dispatch key by operator and overload ("mm", "mm.out"), of the committed list."""
    found: dict[str, str] = {}
    key = ""
    for line in path.read_text().splitlines():
        if line.startswith("["):
            key = line.strip("[]")
        elif line and not line.startswith("#"):
            found = {**dict.fromkeys(line.split(), key), **found}  # the first key counts: its own kernel
    return found


def without_cuda_kernel(names: Iterable[str]) -> tuple[str, ...]:
    """Those of the operators, named without their overload, of which no overload runs on a GPU; sorted."""
    known = {entry.partition(".")[0] for entry in cuda_kernels()}
    return tuple(sorted(set(names) - known))


def list_text() -> str:
    """The list of the torch that is installed, with its version.

    Raises: ConfigError for a build without CUDA.
    """
    import torch

    if torch.version.cuda is None:
        raise ConfigError(
            f"torch {torch.__version__} was built without CUDA and knows no CUDA kernel; install a CUDA build; it needs no GPU"
        )
    lines = [f"# torch {torch.__version__}, CUDA {torch.version.cuda}; made by python -m tools.cuda_operators --write"]
    for key in KEYS:
        registered = torch._C._dispatch_get_registrations_for_dispatch_key(key)
        names = sorted(name.removeprefix(NAMESPACE) for name in registered if name.startswith(NAMESPACE))
        lines += [f"[{key}]", *_wrapped(names)]
    return "\n".join(lines) + "\n"


def _wrapped(names: Sequence[str], width: int = 120) -> list[str]:
    lines: list[str] = []
    for name in names:
        if lines and len(lines[-1]) + len(name) < width:
            lines[-1] += f" {name}"
        else:
            lines.append(name)
    return lines


def main(arguments: Sequence[str]) -> int:
    """Print the list, or write it beside this module."""
    parser = argparse.ArgumentParser(prog="python -m tools.cuda_operators", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {LIST_PATH.name} instead of printing it")
    asked = parser.parse_args(arguments)
    try:
        text = list_text()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    if asked.write:
        write_text_atomically(LIST_PATH, text)
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
