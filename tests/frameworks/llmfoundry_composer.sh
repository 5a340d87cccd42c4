composer -n 8 train/train.py llmfoundry_mpt_7b.yaml max_duration=10ba global_train_batch_size=64
