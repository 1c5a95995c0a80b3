"""The decoder's formulas with backward passes of their own: plain torch operations that save only what backward needs.

Each function here equals autograd of its formula (tests/gpu_workers/test_kernels.py); it is faster because nothing is
zero-filled, joined or cast twice, and because elementwise work goes block by block through a core's cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# Numbers of a block of rows on a CPU, so that temporaries stay near the core. Measured on Zen 4 from 2**14 up.
_BLOCK = 2**18


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        y = torch.empty_like(x)
        scale = x.new_empty(*x.shape[:-1], 1, dtype=wide)
        for part in _rows(x):
            block = x[part].to(wide)
            scale[part] = torch.rsqrt(block.square().mean(-1, keepdim=True) + eps)
            torch.mul((block * scale[part]).to(x.dtype), weight, out=y[part])
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        wide, dx = scale.dtype, torch.empty_like(x)
        dweight = weight.new_zeros(weight.shape, dtype=wide) if ctx.needs_input_grad[1] else None
        weights = weight.to(wide)
        for part in _rows(x):
            unit, gradient = x[part] * scale[part], dy[part].to(wide)
            if dweight is not None:
                dweight += (unit * gradient).flatten(0, -2).sum(0)
            gradient = gradient * weights
            gradient.addcmul_(unit, (unit * gradient).mean(-1, keepdim=True), value=-1)
            dx[part] = gradient.mul_(scale[part])
        return dx, None if dweight is None else dweight.to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, …, n], weight [n] → u ⊙ weight with u = x / √(mean(x²) + eps), computed in float32 and rounded before ⊙.

    Zhang & Sennrich 2019, arXiv:1910.07467. With g = dy ⊙ weight: dx = (g − u · mean(g ⊙ u)) / √(mean(x²) + eps).
    """
    return _RmsNorm.apply(x, weight, eps)  # type: ignore[no-any-return, no-untyped-call]


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        size = gate_up.shape[-1] // 2
        y = gate_up.new_empty(*gate_up.shape[:-1], size)
        for part in _rows(y):
            gate, up = gate_up[part].split(size, -1)
            torch.mul(F.silu(gate), up, out=y[part])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        size, gradient = gate_up.shape[-1] // 2, torch.empty_like(gate_up)
        for part in _rows(dy):
            gate, up = gate_up[part].split(size, -1)
            dgate, dup = gradient[part].split(size, -1)
            torch.ops.aten.silu_backward.grad_input(dy[part] * up, gate, grad_input=dgate)
            torch.mul(dy[part], F.silu(gate), out=dup)
        return gradient


def swiglu(gate_up: Tensor) -> Tensor:
    """[…, 2n] → silu(first n) ⊙ last n (Shazeer 2020, arXiv:2002.05202)."""
    return _SwiGlu.apply(gate_up)  # type: ignore[no-any-return, no-untyped-call]


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(dy, cos, -sin), None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, 2n] of pairs (x[i], x[i+n]), each turned by an angle; cos and sin [T, 1, 2n], both halves alike.

    The transpose of a turn is the turn back, which is its backward pass.
    """
    return _Rotate.apply(x, cos, sin)  # type: ignore[no-any-return, no-untyped-call]


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    size = x.shape[-1] // 2
    cos, sin = cos[..., :size], sin[..., :size]
    y = x.new_empty(x.shape)
    (first, second), (one, other) = x.split(size, -1), y.split(size, -1)
    torch.mul(first, cos, out=one).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=other).addcmul_(first, sin)
    return y


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, scale: float, sizes: list[int], *factors: Tensor
    ) -> Tensor:
        downs, ups = factors[: -len(sizes)], [up.to(x.dtype) for up in factors[-len(sizes) :]]
        down, ranks = torch.cat(downs).to(x.dtype), [up.shape[1] for up in ups]
        inner, y = F.linear(x, down), F.linear(x, weight, bias)
        for outputs, columns, up in zip(y.split(sizes, 1), inner.split(ranks, 1), ups, strict=True):
            if up.numel():
                outputs.addmm_(columns, up.t(), alpha=scale)
        ctx.save_for_backward(x, weight, down, inner, *ups)
        ctx.scale, ctx.sizes, ctx.downs = scale, sizes, [len(one) for one in downs]
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, down, inner, *ups = ctx.saved_tensors
        wide = torch.promote_types(x.dtype, torch.float32)
        outputs, columns = dy.split(ctx.sizes, 1), inner.split([up.shape[1] for up in ups], 1)
        dinner = torch.cat([one @ up for one, up in zip(outputs, ups, strict=True)], dim=1)
        dups = [(one.t() @ z).to(wide).mul_(ctx.scale) for one, z in zip(outputs, columns, strict=True)]
        dx = (dy @ weight).addmm_(dinner, down, alpha=ctx.scale) if ctx.needs_input_grad[0] else None
        ddown = (dinner.t() @ x).to(wide).mul_(ctx.scale)
        return dx, None, None, None, None, *ddown.split(ctx.downs), *dups


def lora_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, downs: Sequence[Tensor], ups: Sequence[Tensor], scale: float
) -> Tensor:
    """x Wᵀ + bias + scale · (x Aᵀ) Bᵀ: x [T, in], W [out, in] frozen, A the stacked `downs`, B block-diagonal of `ups`.

    With z = scale · dy B: dx = dy W + z A, dA = zᵀ x, dB = scale · dyᵀ (x Aᵀ). Factors are float32, matmuls in x's
    dtype.
    """
    return _LoraLinear.apply(  # type: ignore[no-any-return, no-untyped-call]
        x, weight, bias, scale, [len(up) for up in ups], *downs, *ups
    )


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.rows = len(weight)
        return F.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
        (tokens,) = ctx.saved_tensors
        wide = torch.promote_types(dy.dtype, torch.float32)
        total = dy.new_zeros(ctx.rows, dy.shape[-1], dtype=wide)
        return None, total.index_add_(0, tokens, dy.to(wide)).to(dy.dtype)


def embed(tokens: Tensor, weight: Tensor) -> Tensor:
    """weight[tokens]; gradients of a token that comes often are summed in float32."""
    return _Embed.apply(tokens, weight) if weight.requires_grad else F.embedding(tokens, weight)  # type: ignore[no-untyped-call]


def _rows(x: Tensor) -> Iterator[slice]:
    """Blocks of x along its first dimension; all at once on an accelerator."""
    count = len(x)
    size = max(1, _BLOCK // max(1, x[0].numel())) if x.device.type == "cpu" and count else max(1, count)
    for start in range(0, count, size):
        yield slice(start, start + size)
