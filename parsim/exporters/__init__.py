"""Files of other tools, written from task graphs and timelines."""
