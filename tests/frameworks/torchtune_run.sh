#!/bin/bash
#SBATCH --nodes=2
srun tune run --nnodes 2 --nproc_per_node 8 full_finetune_distributed --config torchtune.yaml batch_size=4 tensor_parallel_dim=4
