"""The passes that lower a plan, in order; each has a golden text."""
