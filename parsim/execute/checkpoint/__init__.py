"""Checkpoints: written, read, and divided anew for another plan."""
