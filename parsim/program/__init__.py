"""A plan lowered to tasks, and when each value lives."""
