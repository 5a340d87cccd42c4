"""Replicas trained in one process by the programs that plans run."""
