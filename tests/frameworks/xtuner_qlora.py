from xtuner.model import SupervisedFinetune

pretrained_model_name_or_path = "meta-llama/Meta-Llama-3-8B-Instruct"
max_length = 2048
sequence_parallel_size = 2
batch_size = 1
accumulative_counts = 8
accumulative_counts *= sequence_parallel_size
model = dict(
    type=SupervisedFinetune,
    llm=dict(
        pretrained_model_name_or_path=pretrained_model_name_or_path,
        quantization_config=dict(load_in_4bit=True, bnb_4bit_use_double_quant=True, bnb_4bit_quant_type="nf4"),
    ),
    lora=dict(r=64, lora_alpha=16, lora_dropout=0.1, bias="none"),
)
