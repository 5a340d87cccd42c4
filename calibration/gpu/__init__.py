"""Microbenchmarks of one device at the sizes a GPU is made for, and the programme that runs them within a budget.

driver.py      the clock and the queue of a device: CUDA events, or the wall clock of a CPU
timing.py      seconds per call: warm, queued behind a sleep kernel, sustained
pools.py       operands that rotate through more memory than the L2 cache holds
products.py    matrix products per precision
copies.py      copies on the device, and between host and device
launches.py    what a launch, an event and a graph replay cost
board.py       clocks, power and temperature, read from the driver
journal.py     rows of finished cases, flushed one by one
programme.py   cases in order of value, within a budget, resumable
"""
