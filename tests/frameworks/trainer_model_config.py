import torch
from datasets import load_dataset
from trl import ModelConfig, SFTConfig, SFTTrainer, get_peft_config, get_quantization_config, get_kbit_device_map

model_config = ModelConfig(
    model_name_or_path="Qwen/Qwen2.5-7B-Instruct",
    torch_dtype="bfloat16",
    attn_implementation="flash_attention_2",
    use_peft=True,
    lora_r=32,
    lora_alpha=16,
    lora_target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
    load_in_4bit=True,
)
training_args = SFTConfig(
    output_dir="qwen2.5-7b-sft",
    per_device_train_batch_size=2,
    gradient_accumulation_steps=8,
    gradient_checkpointing=True,
    bf16=True,
    max_seq_length=4096,
    num_train_epochs=3,
    learning_rate=2e-4,
)
trainer = SFTTrainer(
    model=model_config.model_name_or_path,
    args=training_args,
    train_dataset=load_dataset("HuggingFaceH4/ultrachat_200k", split="train_sft"),
    peft_config=get_peft_config(model_config),
)
trainer.train()
