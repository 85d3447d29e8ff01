"""A Trainer in the style of the Hugging Face examples: every argument from the command line."""

from dataclasses import dataclass, field

from tiny_language_model import tiny_data, tiny_model
from transformers import HfArgumentParser, Trainer, TrainingArguments


@dataclass
class DataArguments:
    sequence_length: int = field(default=8, metadata={"help": "tokens of a sample"})


data_arguments, training_arguments = HfArgumentParser((DataArguments, TrainingArguments)).parse_args_into_dataclasses()
data = tiny_data(length=data_arguments.sequence_length)
trainer = Trainer(model=tiny_model(), args=training_arguments, train_dataset=data)
trainer.train()
print(f"took {trainer.state.global_step} steps", flush=True)
