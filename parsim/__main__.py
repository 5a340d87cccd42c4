"""`python -m parsim`."""

from __future__ import annotations

import sys

try:
    from parsim.cli import main
except KeyboardInterrupt:  # Ctrl-C while this is being loaded
    sys.exit(130)

if __name__ == "__main__":
    main()
