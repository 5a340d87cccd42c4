"""Analyses of a Timeline: the breakdown of each rank's step, its critical path, and its lower bounds."""
