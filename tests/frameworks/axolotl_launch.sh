#!/bin/bash
#SBATCH --nodes=1
srun accelerate launch --num_processes 8 -m axolotl.cli.train axolotl_full.yml --micro-batch-size 4
