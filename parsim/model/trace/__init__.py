"""A torch module run once on fake tensors becomes a record of operators and memory."""
