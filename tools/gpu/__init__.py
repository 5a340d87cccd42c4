"""Microbenchmarks of one device at the sizes a GPU is made for, and the programme that runs them within a budget.

device.py      the device under test: a GPU timed by its events, or a CPU by the wall clock
timing.py      seconds per call: warm, queued behind a kernel that waits, sustained
products.py    matrix products per precision
copies.py      copies on the device, and between host and device
launches.py    what a launch, an event and a graph replay cost
board.py       clocks, power and temperature, read from the driver
journal.py     rows of finished cases, flushed one by one
programme.py   cases in order of value, within a budget, resumable
"""
