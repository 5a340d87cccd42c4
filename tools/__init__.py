"""What builds the data that parsim ships, outside the wheel.

parts/              fits of published timings into hardware_profiles/parts: `python -m tools.parts`
published/          profiles of V100 machines from published tables: `python -m tools.published.v100`, `...v100_machines`
gpu/                microbenchmarks of one device within a budget, for experiments/one_gpu
cuda_operators.py   the list of operators that have a CUDA kernel
"""
