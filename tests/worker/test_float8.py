"""precision=fp8 replaces the blocks' matrix products by torchao's, here with float8 emulated on a CPU."""

import pytest
import torch
from torch.nn import functional
from worker_knobs import llama, worker_knobs

from trainfast_runner.worker.invalid import InvalidInput
from trainfast_runner.worker.levers.float8 import actual, convert
from trainfast_runner.worker.model.build import build_model
from trainfast_runner.worker.model.model_config import resolve_config
from trainfast_runner.worker.model.weights import init_weights, outermost_blocks

TOKENS = torch.randint(0, 1024, (4, 32), generator=torch.Generator().manual_seed(1))


def losses(is_float8, steps=8):
    """Losses of a small llama with weights in bf16, whose products are in bf16 or in emulated float8."""
    knobs = worker_knobs(precision="bf16-pure")
    model = build_model(resolve_config(llama()), "causal-lm", knobs, torch.device("cpu"))
    if is_float8:
        convert(model, outermost_blocks(model), emulate=True)
        assert actual(model) == {"float8_layers": 14}, "seven in each of two blocks, and not the head"
        assert type(model.lm_head) is torch.nn.Linear
    init_weights(model, 7, torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        logits = model(input_ids=TOKENS).logits.float()
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def test_float8_learns_as_bf16_does_and_not_the_same():
    plain, float8 = list(losses(is_float8=False)), list(losses(is_float8=True))
    assert (float8[0], float8) == (pytest.approx(plain[0], rel=2e-2), pytest.approx(plain, rel=5e-2))
    assert float8[-1] < 0.95 * float8[0]
    assert float8 != plain, "the products are other numbers"


def test_a_model_whose_sizes_float8_cannot_have_is_refused():
    fields = llama(hidden_size=24, intermediate_size=40, num_attention_heads=2)
    model = build_model(resolve_config(fields), "causal-lm", worker_knobs(), torch.device("meta"))
    with pytest.raises(InvalidInput, match="no linear layer of llama has sizes that are multiples of 16"):
        convert(model, outermost_blocks(model))
