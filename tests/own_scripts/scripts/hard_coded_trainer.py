"""A Trainer whose arguments are in the script."""

import tempfile

from tiny_language_model import tiny_data, tiny_model
from transformers import Trainer, TrainingArguments

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=10,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model=tiny_model(), args=arguments, train_dataset=tiny_data())
    trainer.train()
    print(f"took {trainer.state.global_step} steps", flush=True)
