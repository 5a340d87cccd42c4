"""numba's `njit`, with one message where numba cannot be imported: each of its versions refuses newer versions of NumPy.

Importing this module loads numba (about a second), or raises MissingDependencyError.
"""

from __future__ import annotations

from parsim.errors import MissingDependencyError

try:
    import numba
except ImportError as error:
    raise MissingDependencyError(
        f"simulating needs numba, which cannot be imported: {str(error).rstrip('.')}; "
        "install versions that go together: pip install --upgrade numba numpy"
    ) from error

njit = numba.njit
