torchrun --nproc_per_node=4 train.py --model convnext_tiny --batch-size 64 --amp
