"""`python -m parsim`."""

from __future__ import annotations

from parsim.cli import main

if __name__ == "__main__":
    main()
