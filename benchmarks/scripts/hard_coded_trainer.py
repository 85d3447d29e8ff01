"""A Trainer whose arguments are in the script."""

import json
import tempfile

from language_model import StepEnds, rows, small_model
from sizes import SEQUENCES
from transformers import Trainer, TrainingArguments

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=SEQUENCES,
        num_train_epochs=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    Trainer(model=small_model(), args=arguments, train_dataset=rows(), callbacks=[StepEnds()]).train()
print(json.dumps(StepEnds.ends))
