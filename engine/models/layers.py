"""The few layers a dense decoder is made of. They hold plain tensors: nothing here is trained."""

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.engine.numerics import FAST, Numerics

Named = Iterator[tuple[str, Tensor]]


class WeightScheme(Protocol):
    """How a linear layer stores its matrix, and multiplies by it."""

    def apply(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""

    def swiglu(self, x: Tensor) -> Tensor:
        """silu of the product's first half times the second: [T, in] -> [T, out / 2]."""

    def add(self, x: Tensor, residual: Tensor, norm: Tensor, eps: float) -> Tensor:
        """Add the product to residual, in place. Returns the residual's RMS norm, [T, out]."""

    def tensors(self) -> Mapping[str, Tensor]:
        """What a checkpoint stores, by the end of its name; every tensor's first dimension is ``out``."""


class PlainWeights:
    """A matrix in the model's own dtype."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        device: torch.device,
        dtype: torch.dtype,
        numerics: Numerics = FAST,
    ) -> None:
        self.numerics = numerics
        self.weight = torch.empty(out_features, in_features, device=device, dtype=dtype)
        self.bias = torch.empty(out_features, device=device, dtype=dtype) if bias else None

    def apply(self, x: Tensor) -> Tensor:
        return self.numerics.linear(x, self.weight, self.bias)

    def swiglu(self, x: Tensor) -> Tensor:
        return self.numerics.swiglu(x, self.weight, self.bias)

    def add(self, x: Tensor, residual: Tensor, norm: Tensor, eps: float) -> Tensor:
        return self.numerics.add_linear(x, self.weight, self.bias, residual, norm, eps)

    def tensors(self) -> Mapping[str, Tensor]:
        return {"weight": self.weight} if self.bias is None else {"weight": self.weight, "bias": self.bias}


class Linear:
    """y = W x + b, where W may stack several of the checkpoint's matrices: ``parts`` gives their names and rows."""

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        device: torch.device,
        dtype: torch.dtype,
        bias: bool = False,
        numerics: Numerics = FAST,
        scheme: Callable[..., WeightScheme] = PlainWeights,
    ) -> None:
        self.parts = parts
        self.scheme = scheme(in_features, sum(parts.values()), bias, device, dtype, numerics)

    def apply(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        return self.scheme.apply(x)

    def swiglu(self, x: Tensor) -> Tensor:
        """silu of y's first half times the second: [T, in] -> [T, out / 2]."""
        return self.scheme.swiglu(x)

    def add(self, x: Tensor, residual: Tensor, norm: Tensor, eps: float) -> Tensor:
        """Add y to residual [T, out], in place. Returns the residual's RMS norm by the weights ``norm``, [T, out]."""
        return self.scheme.add(x, residual, norm, eps)

    def destinations(self) -> Named:
        """Where each tensor of the checkpoint goes: its name, and the rows that it fills."""
        start = 0
        for name, rows in self.parts.items():
            for leaf, tensor in self.scheme.tensors().items():
                yield f"{name}.{leaf}", tensor[start : start + rows]
            start += rows


class Embedding:
    """A row of ``weight`` for each token id; the same matrix may serve as the output head."""

    def __init__(self, rows: int, features: int, name: str, device: torch.device, dtype: torch.dtype) -> None:
        self.name = name
        self.weight = torch.empty(rows, features, device=device, dtype=dtype)

    def apply(self, ids: Tensor) -> Tensor:
        """[T] int64 -> [T, features]."""
        return F.embedding(ids, self.weight)

    def destinations(self) -> Named:
        yield f"{self.name}.weight", self.weight
