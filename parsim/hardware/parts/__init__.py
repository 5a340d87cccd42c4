"""Hardware from parts: GPUs, links and networks by name, and machines made of them."""
