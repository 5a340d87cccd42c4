from trl import DPOConfig, DPOTrainer
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2-0.5B-Instruct")
args = DPOConfig(output_dir="o", per_device_train_batch_size=2)
