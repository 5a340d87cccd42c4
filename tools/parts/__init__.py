"""Hardware parts: fits of published kernel and collective timings, and the tables they are written to."""
