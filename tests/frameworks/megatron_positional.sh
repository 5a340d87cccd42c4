#!/bin/bash
set -e
ENV=$1
MEGATRON_PATCH_PATH=../../..
if [ $ENV = dsw ]; then
export CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7
MASTER_ADDR=localhost
NNODES=1
NODE_RANK=0
GPUS_PER_NODE=8
elif [ $ENV = dlc ]; then
NNODES=${WORLD_SIZE}
NODE_RANK=${RANK}
GPUS_PER_NODE=${KUBERNETES_CONTAINER_RESOURCE_GPU}
fi
DISTRIBUTED_ARGS="--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --node_rank $NODE_RANK --master_addr $MASTER_ADDR --master_port $MASTER_PORT"
MODEL_SIZE=$2
BATCH_SIZE=$3
GLOBAL_BATCH_SIZE=$4
LR=$5
SEQ_LEN=$7
PR=$10
TP=${11}
PP=${12}
if [ $MODEL_SIZE = 7B ]; then
HIDDEN_SIZE=3584
NUM_ATTN_HEADS=28
NUM_LAYERS=28
INTERMEDIATE_SIZE=18944
NUM_KEY_VALUE_HEADS=4
MAX_POSITION_EMBEDDINGS=131072
EXTRA_VOCAB_SIZE=421
elif [ $MODEL_SIZE = 72B ]; then
HIDDEN_SIZE=8192
NUM_ATTN_HEADS=64
NUM_LAYERS=80
INTERMEDIATE_SIZE=29568
NUM_KEY_VALUE_HEADS=8
MAX_POSITION_EMBEDDINGS=131072
EXTRA_VOCAB_SIZE=421
fi
if [ $PR = fp16 ]; then
    pr_options=" --fp16 "
elif [ $PR = bf16 ]; then
    pr_options=" --bf16 "
fi
megatron_options="  \
        --save ${SAVED_PRETRAIN_CHECKPOINT_PATH} \
        --micro-batch-size ${BATCH_SIZE} \
        --global-batch-size ${GLOBAL_BATCH_SIZE} \
        --num-layers ${NUM_LAYERS} \
        --hidden-size ${HIDDEN_SIZE} \
        --num-attention-heads ${NUM_ATTN_HEADS} \
        --ffn-hidden-size ${INTERMEDIATE_SIZE} \
        --seq-length ${SEQ_LEN} \
        --max-position-embeddings ${MAX_POSITION_EMBEDDINGS} \
        --tensor-model-parallel-size ${TP} \
        --pipeline-model-parallel-size ${PP} \
        --extra-vocab-size ${EXTRA_VOCAB_SIZE} \
        --patch-tokenizer-type Qwen2Tokenizer \
        --swiglu --normalization RMSNorm --use-rotary-position-embeddings --add-qkv-bias --disable-bias-linear \
        --group-query-attention --num-query-groups ${NUM_KEY_VALUE_HEADS} \
        "
run_cmd="torchrun $DISTRIBUTED_ARGS pretrain_qwen.py ${megatron_options} ${pr_options}"
echo ${run_cmd}
eval ${run_cmd}
