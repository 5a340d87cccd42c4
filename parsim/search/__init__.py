"""Which plan: enumerate, estimate, simulate the best, refine."""
