#!/bin/bash
torchrun --nproc_per_node=8 train.py /data/imagenet --model vit_base_patch16_224 -b 128 --amp --opt adamw --epochs 300 --sched cosine --lr 1e-3 --drop-path 0.1 --aa rand-m9-mstd0.5-inc1 --mixup 0.8
