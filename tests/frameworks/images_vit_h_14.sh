torchrun --nproc_per_node=8 train.py --model vit_h_14 --batch-size 32 --opt sgd --amp --train-crop-size 518 --val-crop-size 518
