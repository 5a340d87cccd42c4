#!/bin/bash
# Llama 3 8B with Megatron-LM, as `parsim check` reads it.
torchrun --nproc_per_node 8 pretrain_gpt.py \
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \
  --group-query-attention --num-query-groups 8 --swiglu --untie-embeddings-and-output-weights \
  --seq-length 8192 --max-position-embeddings 8192 --vocab-size 128256 --bf16 \
  --tensor-model-parallel-size 4 --pipeline-model-parallel-size 1 --sequence-parallel --use-distributed-optimizer \
  --micro-batch-size 1 --global-batch-size 128 --use-flash-attn \
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
