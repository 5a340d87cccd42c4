#!/bin/bash
# Sizes of base.yml, with one factor: 8 doubles heads and MLP, width and layers once each.
python3 MaxText/train.py MaxText/configs/base.yml run_name=${1} dcn_data_parallelism=1 ici_fsdp_parallelism=8 \
  steps=10 per_device_batch_size=4 remat_policy=full scale=8 enable_profiler=true
