"""The base model is opened with what its device computes with."""

import pytest
import torch

from twofold.policy import dtype_of
from twofold.settings import Model


@pytest.mark.parametrize(
    ("named", "has", "opened"),
    [
        ("auto", {"avx2": True, "avx512_f": True, "avx512_bf16": False}, torch.float32),
        ("auto", {"avx2": True, "avx512_bf16": True}, torch.bfloat16),
        ("auto", {"neon": True, "bf16": True}, torch.bfloat16),
        ("bfloat16", {"avx2": True}, torch.bfloat16),
        ("float32", {"avx512_bf16": True}, torch.float32),
    ],
)
def test_auto_is_bfloat16_where_the_processor_computes_with_it(
    monkeypatch: pytest.MonkeyPatch, named: str, has: dict[str, bool], opened: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    assert dtype_of(Model(device="cpu", dtype=named)) == opened
