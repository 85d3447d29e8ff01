"""A Trainer with arguments in the script that saves every step, and its model at the end."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 1 << 20

    def __getitem__(self, place):
        row = torch.arange(64) % 512
        return {"input_ids": row, "labels": row}


torch.set_num_threads(1)
arguments = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=4,
    max_steps=1000,
    logging_steps=1,
    save_strategy="steps",
    save_steps=1,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
config = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2)
trainer = Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=Rows())
trainer.train()
trainer.save_model("out/final")
