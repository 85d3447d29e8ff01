"""A Trainer in the style of the Hugging Face examples: every argument from the command line."""

from hard_coded_trainer import train
from transformers import HfArgumentParser, TrainingArguments

train(*HfArgumentParser(TrainingArguments).parse_args_into_dataclasses())
