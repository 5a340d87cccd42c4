#!/bin/bash
# a larger batch than in the configuration, without torch.compile
torchrun --standalone --nproc_per_node=8 train.py config/nanogpt_train_gpt2.py --batch_size=16 --compile=False
