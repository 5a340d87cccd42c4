#!/bin/bash
# A training as the examples of Megatron-LM write it.
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-2}
WORLD_SIZE=$(($GPUS_PER_NODE*$NNODES))
TP=4
PP="2"
HIDDEN=${HIDDEN:-1024}

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NNODES
    --master_addr $(hostname)   # the first node
)

MODEL_ARGS="
    --num-layers 8 \
    --hidden-size ${HIDDEN} \
    --ffn-hidden-size 2816 \
    --num-attention-heads 16 \
    --group-query-attention \
    --num-query-groups 8 \
    --seq-length 2048 \
    --max-position-embeddings 2048 \
    --position-embedding-type rope \
    --swiglu \
    --normalization RMSNorm \
    --disable-bias-linear \
    --untie-embeddings-and-output-weights \
    --vocab-size 32000
"
TRAINING_ARGS=(
    --micro-batch-size 2
    --global-batch-size $((WORLD_SIZE * 2))
    --train-iters 500
    --lr 3.0e-4
    --bf16
    --optimizer adam
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size $TP
    --pipeline-model-parallel-size $PP
)
PARALLEL_ARGS+=(--sequence-parallel --use-distributed-optimizer --tp-comm-overlap --brand-new-thing 3)

torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    $MODEL_ARGS \
    "${TRAINING_ARGS[@]}" \
    ${PARALLEL_ARGS[@]} \
    --log-interval 10 --save ${CHECKPOINTS}
