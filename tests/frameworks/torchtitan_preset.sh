torchrun -m torchtitan.train --module llama3 --config llama3_8b --training.seq_len 4096 \
  --training.local_batch_size 4 --parallelism.tensor_parallel_degree 2 --parallelism.pipeline_parallel_degree=1
