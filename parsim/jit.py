"""numba's `njit` where numba is installed (the extra `fast`); where it is not, the same loops run as plain Python.

Both give equal numbers. Importing this module loads numba (about a second). A numba that is there and refuses to be imported
raises MissingDependencyError: each of its versions refuses newer versions of NumPy.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from parsim.errors import MissingDependencyError

COMPILED = importlib.util.find_spec("numba") is not None
"""Whether loops are compiled."""

if COMPILED:
    try:
        import numba
    except ImportError as error:
        raise MissingDependencyError(
            f"simulating needs numba, which cannot be imported: {str(error).rstrip('.')}; "
            "install versions that go together: pip install --upgrade numba numpy"
        ) from error


def njit(*, plain: Callable[..., Any] | None = None, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """numba.njit with these options. Without numba the function itself, or `plain`, which gives the same by numpy."""

    def compiled(function: Callable[..., Any]) -> Any:
        if not COMPILED:
            return plain or function
        return numba.njit(**options)(function)

    return compiled
