"""Calls of the two conversion commands, and bitwise comparison of what they read and write."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.weights.loaded import Layout
from tools import convert_hf_to_megatron, convert_megatron_to_hf

FILE = "model.safetensors"
ONE = Layout()


def read(directory):
    tensors = {}
    for file in Path(directory).glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def assert_same(found, expected):
    """Bit by bit, types included."""
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def rewrite(path, change):
    tensors = load_file(path / FILE)
    change(tensors)
    save_file(tensors, path / FILE, metadata={"format": "pt"})


def to_megatron(hf, out, layout=ONE, *options):
    arguments = ["--hf", hf, "--out", out, "--make-vocab-size-divisible-by", 64,
                 "--tensor-model-parallel-size", layout.tp,
                 "--pipeline-model-parallel-size", layout.pp, *options]  # fmt: skip
    if layout.vpp:
        arguments += ["--virtual-pipeline-model-parallel-size", layout.vpp]
    return convert_hf_to_megatron.main([str(a) for a in arguments])


def to_hf(megatron, out, *options):
    arguments = ["--megatron", megatron, "--out", out, *options]
    return convert_megatron_to_hf.main([str(a) for a in arguments])
