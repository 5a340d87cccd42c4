"""Configuration files of Megatron-LM, NeMo and torchtitan, read as they are."""
