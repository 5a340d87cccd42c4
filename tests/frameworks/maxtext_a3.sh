export RUN_NAME="llama2-$(date +%F)"
export EXECUTABLE="train.py"
python MaxText/$EXECUTABLE MaxText/configs/models/gpu/llama2_7b.yml run_name=$RUN_NAME \
    dcn_data_parallelism=2 ici_fsdp_parallelism=8 base_output_directory=gs://bucket
