"""Private training of torch's transformer, recurrent and convolution layers by several ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from meshes import mesh_of
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, TensorDataset

import dpflash

SAMPLES, TOKENS, WIDTH = 30, 7, 8


class Scaled(nn.Module):
    """A parameter beside a layer, whose weight the forward also reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * self.scale + x @ self.linear.weight
        return y


class Layers(nn.Module):
    """One after another, in both batch orders."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0)
        norm = nn.LayerNorm(WIDTH)
        self.encoder = nn.TransformerEncoder(layer, 1, norm, enable_nested_tensor=False)
        self.cross = nn.MultiheadAttention(WIDTH, 2, batch_first=True, add_bias_kv=True)
        self.lstm = nn.LSTM(WIDTH, WIDTH, bidirectional=True)
        self.gru = nn.GRU(2 * WIDTH, WIDTH, batch_first=True)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.scaled = Scaled()

    def forward(self, x: Tensor) -> Tensor:
        memory = self.encoder(x.transpose(0, 1)).transpose(0, 1)
        x = self.cross(x, memory, memory, need_weights=False)[0]
        x = self.gru(self.lstm(x.transpose(0, 1))[0].transpose(0, 1))[0]
        y: Tensor = self.scaled(self.conv(x.transpose(1, 2)).transpose(1, 2))
        return y

    def parts(self) -> list[nn.Module]:
        return [
            self.encoder.layers[0],
            self.cross,
            self.lstm,
            self.gru,
            self.conv,
            self.scaled,
            self,
        ]


class Adapted(nn.Module):
    """A frozen layer with a DoRA adapter."""

    def __init__(self) -> None:
        import peft

        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        options = {"r": 2, "target_modules": ["linear"], "init_lora_weights": False}
        peft.inject_adapter_in_model(peft.LoraConfig(use_dora=True, **options), self)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y

    def parts(self) -> list[nn.Module]:
        return [self.linear, self]


def train(
    group: object = None,
    *,
    kind: str = "Layers",
    sharded: bool = False,
    mixed: bool = False,
    **clipping: Any,
) -> np.ndarray:
    """The parameters after two private steps; by one process where there is no group."""
    torch.manual_seed(0)
    model: Any = {"Layers": Layers, "Adapted": Adapted}[kind]()
    mesh = None
    if dist.is_initialized():
        mesh = mesh_of(1)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if mixed else None)
        for part in model.parts() if sharded else ():
            fully_shard(part, mesh=mesh["data"], mp_policy=policy)
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(SAMPLES, TOKENS, WIDTH, generator=generator) for _ in range(2))
    engine = dpflash.PrivacyEngine(seed=3, mesh=mesh)
    made, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=6),
        noise_multiplier=0.5,
        **{"max_grad_norm": 0.05, **clipping},
    )
    while optimizer.releases < 2:
        for x, y in loader:
            engine.backward((made(x) - y).square().mean((1, 2)))
            optimizer.step()
            optimizer.zero_grad()
            if optimizer.releases == 2:
                break
    parts = [p.detach() for p in model.parameters()]
    parts = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in parts]
    return torch.cat([p.flatten() for p in parts]).numpy()
