"""Predictions and measurements for people: tables, figures, traces, and the comparison of the two.

`compare` and `chrome_trace` need numpy alone; `tables` needs rich, `figures` and `html` need plotly.
"""
