# GPT-2 medium from scratch, FSDP fork
n_layer = 24
n_head = 16
n_embd = 1024
dropout = 0.0
bias = False
block_size = 2048
batch_size = 8
gradient_accumulation_steps = 5 * 8
max_iters = 600000
lr_decay_iters = 600000
weight_decay = 1e-1
dtype = 'float16'
vocab_size = 32000
grad_checkpoint = True
