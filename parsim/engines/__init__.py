"""When every task of a TaskGraph starts and ends, given the seconds each one takes.

Two engines, one semantics, one return type: `static.simulate` (arrays, numba, millions of tasks per second, many
samples of the durations in one call) and `dynamic.simulate` (SimPy events). Both raise the errors of `deadlock`.
"""
