#!/bin/bash
litgpt finetune_lora meta-llama/Llama-3.1-8B --data Alpaca --precision bf16-true --quantize bnb.nf4 --devices 1 \
  --train.global_batch_size 16 --train.micro_batch_size 2 --train.max_seq_length 1024 --lora_r 16 --lora_mlp true
