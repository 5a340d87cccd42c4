#!/bin/bash
#SBATCH --nodes=4
#SBATCH --gpus-per-node=8
srun torchrun --nnodes=4 --nproc_per_node=8 train.py --model resnet50 --batch-size 128 --lr 0.5 \
    --lr-scheduler cosineannealinglr --lr-warmup-epochs 5 --label-smoothing 0.1 --train-crop-size 176 --val-resize-size 232 \
    --model-ema --ra-sampler --ra-reps 4 --amp
