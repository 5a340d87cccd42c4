#!/bin/bash
NUM_PROC=8
torchrun --nproc_per_node=$NUM_PROC train.py --data-dir /data/imagenet --model vit_large_patch16_224.augreg_in21k --batch-size 64 --grad-accum-steps 4 --amp --amp-dtype bfloat16 --opt adamw --lr 5e-4 --weight-decay 0.05 --sched cosine --epochs 50 --grad-checkpointing --torchcompile inductor
