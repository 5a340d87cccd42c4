#!/bin/bash
MICRO_BATCH=1
SP=4
ZERO_STAGE=3
deepspeed --num_gpus 8 pretrain_gpt.py --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --ds-sequence-parallel-size $SP \
 --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 65536 --max-position-embeddings 65536 \
 --micro-batch-size $MICRO_BATCH --global-batch-size 8 --train-iters 100 --zero-stage=${ZERO_STAGE} --bf16 \
 --deepspeed --deepspeed_config ds.json --use-flash-attn-v2 --vocab-file gpt2-vocab.json --tokenizer-type GPT2BPETokenizer
