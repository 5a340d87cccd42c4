from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments
tokenizer = AutoTokenizer.from_pretrained("google-bert/bert-base-cased")
def tokenize(examples):
    return tokenizer(examples["text"], padding="max_length", truncation=True, max_length=256)
model = AutoModelForSequenceClassification.from_pretrained("google-bert/bert-base-cased", num_labels=5)
training_args = TrainingArguments(output_dir="test_trainer", eval_strategy="epoch", per_device_train_batch_size=16, fp16=True)
trainer = Trainer(model=model, args=training_args)
trainer.train()
