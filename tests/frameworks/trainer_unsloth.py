from unsloth import FastLanguageModel
import torch
max_seq_length = 2048
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name = "unsloth/Meta-Llama-3.1-8B-bnb-4bit",
    max_seq_length = max_seq_length,
    load_in_4bit = True,
)
model = FastLanguageModel.get_peft_model(model, r = 16, target_modules = ["q_proj", "k_proj", "v_proj", "o_proj","gate_proj", "up_proj", "down_proj",], lora_alpha = 16, use_gradient_checkpointing = "unsloth")
from trl import SFTTrainer, SFTConfig
trainer = SFTTrainer(model = model, tokenizer = tokenizer, train_dataset = dataset, args = SFTConfig(per_device_train_batch_size = 2, gradient_accumulation_steps = 4, warmup_steps = 5, max_steps = 60, learning_rate = 2e-4, optim = "adamw_8bit", weight_decay = 0.01))
trainer.train()
