import torch
from datasets import load_dataset
from peft import LoraConfig, prepare_model_for_kbit_training, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, TrainingArguments
from trl import SFTTrainer

base_model = "mistralai/Mistral-7B-v0.1"
bnb_config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_use_double_quant=True)
model = AutoModelForCausalLM.from_pretrained(base_model, quantization_config=bnb_config, device_map={"": 0})
model.config.use_cache = False
model = prepare_model_for_kbit_training(model)
peft_config = LoraConfig(lora_alpha=16, lora_dropout=0.1, r=64, bias="none", task_type="CAUSAL_LM", target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj"])
model = get_peft_model(model, peft_config)
batch = 4
training_arguments = TrainingArguments(output_dir="./results", num_train_epochs=1, per_device_train_batch_size=batch, gradient_accumulation_steps=2 * 2, optim="paged_adamw_32bit", save_steps=25, learning_rate=2e-4, weight_decay=0.001, fp16=False, bf16=False, max_grad_norm=0.3, max_steps=-1, warmup_ratio=0.3, group_by_length=True, lr_scheduler_type="constant")
trainer = SFTTrainer(model=model, train_dataset=load_dataset("x"), peft_config=peft_config, max_seq_length=1024, args=training_arguments, packing=False)
trainer.train()
