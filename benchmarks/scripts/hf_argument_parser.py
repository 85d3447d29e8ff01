"""A Trainer in the style of the Hugging Face examples: every argument from the command line."""

import json

from language_model import StepEnds, rows, small_model
from transformers import HfArgumentParser, Trainer, TrainingArguments

(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
Trainer(model=small_model(), args=arguments, train_dataset=rows(), callbacks=[StepEnds()]).train()
print(json.dumps(StepEnds.ends))
