"""The explorer: one page of a sweep that needs no network."""
