"""The layers for a few tokens on the CPU, where the calls around the products cost more than the products.

`LayerStack` runs layers one after the other. A step of a few fp32 tokens takes a second road: it computes what
`Layer.forward` computes, on numpy arrays from one end to the other, with parameters that were looked up once, and
torch for the products and the attention. The layers themselves are the reference.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import getitem
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepinfer.models.deepseek_v41 import small_cpu
from deepinfer.models.deepseek_v41.attention import Attention
from deepinfer.models.deepseek_v41.compressor import Compressor
from deepinfer.models.deepseek_v41.decode_stack import run_layers
from deepinfer.models.deepseek_v41.engram import Engram
from deepinfer.models.deepseek_v41.few_pools import CompressorViews, IndexerViews
from deepinfer.models.deepseek_v41.indexer import Indexer
from deepinfer.models.deepseek_v41.layer import Layer, LayerPass
from deepinfer.models.deepseek_v41.moe import MoE
from deepinfer.models.deepseek_v41.norm import RMSNorm
from deepinfer.models.deepseek_v41.rope import Rotation
from deepinfer.models.deepseek_v41.rounding import Rounding

__all__ = ["LayerStack"]


class LayerStack:
    """Layers that run one after the other.

    Attributes:
        deterministic: Take the layers' own road always: how many tokens share a step must not choose the arithmetic.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        """Takes the modules, which stay the owners of the parameters."""
        self._layers = layers
        self.deterministic = False
        self._views: _Views | None = None

    def __getstate__(self) -> dict[str, object]:
        """Copies and pickles go without the views, which can be made again."""
        return {**self.__dict__, "_views": None}

    def __call__(self, streams: Tensor, pre: Tensor, run: LayerPass) -> tuple[Tensor, Tensor]:
        """Runs the layers.

        Args:
            streams: Residual streams, shape [tokens, streams, hidden].
            pre: Weights by which the first sublayer sums them, shape [tokens, streams], fp32.
            run: The pass.

        Returns:
            The streams behind the last layer, and the weights that collapse them.
        """
        if getattr(run, "kernels", None) is not None:
            return run_layers(self._layers, streams, pre, run)
        with small_cpu.quiet():
            views = self._views_for(streams, run)
            if views is not None:
                return views.run(streams, pre, run)
            for layer in self._layers:
                streams, pre = layer(streams, pre, run)
                if not len(streams):
                    break
        return streams, pre

    def _views_for(self, streams: Tensor, run: LayerPass) -> _Views | None:
        """The views, when the arrays can do this step; they are made again when a parameter was replaced."""
        if self.deterministic or run.is_image is not None or run.narrow_layer is not None:
            return None
        if not small_cpu.fits(streams, small_cpu.MOST_STEP_VALUES):
            return None
        if self._views is None or not self._views.are_current():
            self._views = _Views(self._layers)
        return self._views if self._views.usable else None


class _Views:
    """Views of the parameters of some layers.

    Attributes:
        usable: Whether all parameters are fp32 in CPU memory and no forward hook waits for a call.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        modules = [m for layer in layers for m in layer.modules()]
        places = [(m._parameters, n, p) for m in modules for n, p in m._parameters.items()]
        self._hooks = [h for m in modules for h in (m._forward_hooks, m._forward_pre_hooks)]
        self._fits = all(p is None or (p.is_cpu and p.dtype is torch.float32) for *_, p in places)
        # Packed weights have no address, and are only used as they are.
        self._owners = [owner for owner, _, p in places if type(p) is nn.Parameter]
        self._names = [name for _, name, p in places if type(p) is nn.Parameter]
        self._addresses = self._find()
        self._layers: list[_LayerViews] = []
        if self._fits:
            self._layers = [_LayerViews(layer) for layer in layers if isinstance(layer, Layer)]

    @property
    def usable(self) -> bool:
        return self._fits and not any(self._hooks)

    def are_current(self) -> bool:
        """Whether all parameters lie where they lay; asked every step, hence in a few C calls."""
        return self._find() == self._addresses

    def _find(self) -> list[int]:
        return list(map(Tensor.data_ptr, map(getitem, self._owners, self._names)))

    def run(self, streams: Tensor, pre: Tensor, run: LayerPass) -> tuple[Tensor, Tensor]:
        """Twin of the loop over the layers."""
        values, weights = streams.numpy(), pre.numpy()
        phases = _Phases(run.rotation(False)), _Phases(run.rotation(True))
        for layer in self._layers:
            values, weights = layer.run(values, weights, run, phases)
        return torch.from_numpy(values), torch.from_numpy(weights)


class _Phases:
    """A `Rotation` as arrays."""

    def __init__(self, rotation: Rotation) -> None:
        self.per_token = rotation.per_token.numpy()
        self.per_head = rotation.per_head.numpy()
        self.per_head_inverse = rotation.per_head_inverse.numpy()


class _LayerViews:
    """Twin of `Layer`."""

    def __init__(self, layer: Layer) -> None:
        self._layer_id = layer.layer_id
        self._feeds_draft = layer.feeds_draft
        self._engram = _EngramViews(layer.engram) if layer.engram is not None else None
        self._attention = _AttentionViews(layer.attn)
        self._experts = _MoEViews(layer.ffn)
        options = layer.mix_options
        self._before_attention = _Mixing(
            layer.hc_attn_fn, layer.hc_attn_base, layer.hc_attn_scale, layer.attn_norm, **options
        )
        self._before_experts = _Mixing(
            layer.hc_ffn_fn, layer.hc_ffn_base, layer.hc_ffn_scale, layer.ffn_norm, **options
        )

    def run(
        self, streams: np.ndarray, pre: np.ndarray, run: LayerPass, phases: tuple[_Phases, _Phases]
    ) -> tuple[np.ndarray, np.ndarray]:
        if self._engram is not None:
            streams = self._engram.run(streams, run.engram_rows[self._layer_id])
        if self._feeds_draft and run.features is not None:
            run.features.append(torch.from_numpy(streams.mean(1)))
        y, pre, post, mix = self._before_attention.enter(streams, pre)
        streams = small_cpu.leave_sublayer(streams, self._attention.run(y, run, phases), post, mix)
        y, pre, post, mix = self._before_experts.enter(streams, pre)
        return small_cpu.leave_sublayer(streams, self._experts.run(y), post, mix), pre


class _Mixing:
    """Twin of `hyper_connection.enter_sublayer` for one sublayer."""

    def __init__(
        self,
        fn: Tensor,
        base: Tensor,
        scale: Tensor,
        norm: RMSNorm,
        *,
        iterations: int,
        norm_eps: float,
        eps: float,
    ) -> None:
        self._fn = fn
        self._arrays = base.detach().numpy(), scale.detach().numpy(), norm.weight.detach().numpy()
        self._options = iterations, norm_eps, eps

    def enter(
        self, streams: np.ndarray, pre: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        products = _product(streams.reshape(len(streams), -1), self._fn)
        return small_cpu.enter_sublayer(streams, pre, products, *self._arrays, *self._options)


class _AttentionViews:
    """Twin of `Attention`."""

    def __init__(self, attention: Attention) -> None:
        self._attention = attention
        self._compressed = attention.ratio > 0
        self._heads = attention.num_heads
        # A pass takes the twins for the modules.
        self._indexer: Indexer | None = None
        self._compressor: Compressor | None = None
        if attention.indexer is not None:
            self._indexer = cast(Indexer, IndexerViews(attention.indexer))
        if attention.compressor is not None:
            self._compressor = cast(Compressor, CompressorViews(attention.compressor))
        self._round = _Rounding(attention.rounding)
        self._wq_a, self._wq_b = attention.wq_a.weight, attention.wq_b.weight
        self._wkv, self._wo_b = attention.wkv.weight, attention.wo_b.weight
        self._wo_a, self._groups = attention.wo_a.weight, attention.num_groups
        self._q_norm = attention.q_norm.weight.detach().numpy(), attention.q_norm.eps
        self._kv_norm = attention.kv_norm.weight.detach().numpy(), attention.kv_norm.eps

    def run(self, y: np.ndarray, run: LayerPass, phases: tuple[_Phases, _Phases]) -> np.ndarray:
        tokens, rotation, tensor = len(y), phases[self._compressed], torch.from_numpy
        x = tensor(self._round.activation(y))
        bottleneck = small_cpu.rms_norm(F.linear(x, self._wq_a).numpy(), *self._q_norm)
        kv = small_cpu.rms_norm(F.linear(x, self._wkv).numpy(), *self._kv_norm)
        small_cpu.apply_rope_(kv, rotation.per_token)
        bottleneck, kv = map(tensor, self._round.bottleneck_and_window(bottleneck, kv))
        queries = F.linear(bottleneck, self._wq_b).view(tokens, self._heads, -1)
        small_cpu.apply_rope_(queries.numpy(), rotation.per_head)
        if self._indexer is not None:
            normed = tensor(y)
            if self._compressor is not None:
                run.extend_pool(self._attention, self._compressor, self._indexer, normed)
            run.select(self._attention, self._indexer, bottleneck, normed)
        attended = run.attend(self._attention, queries, kv)
        small_cpu.apply_rope_(attended.numpy(), rotation.per_head_inverse)
        grouped = attended.view(tokens, self._groups, -1).transpose(0, 1)
        wo_a = self._wo_a.view(self._groups, -1, grouped.shape[-1]).transpose(1, 2)
        narrow = torch.bmm(grouped, wo_a).numpy().swapaxes(0, 1).reshape(tokens, -1)
        return _product(self._round.activation(narrow), self._wo_b)


class _MoEViews:
    """Twin of `MoE`."""

    def __init__(self, moe: MoE) -> None:
        self._round = _Rounding(moe.rounding)
        self._limit = moe.limit
        self._gate = moe.gate.weight
        self._route = moe.gate.bias.detach().numpy(), moe.gate.topk, moe.gate.scaling
        self._w13, self._w2 = _Transposed(moe.experts.w13), _Transposed(moe.experts.w2)
        shared = moe.shared_experts
        self._shared = [w.weight for w in (shared.w1, shared.w3, shared.w2)]

    def run(self, y: np.ndarray) -> np.ndarray:
        weights, experts = small_cpu.route(_product(y, self._gate), *self._route)
        x = self._round.activation(y)
        tokens, topk = experts.shape
        pairs = tokens * topk
        weights, whole = weights.reshape(-1), torch.from_numpy(x)
        # Pairs of a token and an expert lie in the order of their experts; the shared expert's rows follow.
        order, flat = None, experts.reshape(-1)
        chosen, counts, inputs = flat.tolist(), [1] * topk, [whole] * topk
        if tokens > 1:
            order = flat.argsort(kind="stable")
            found = np.bincount(flat)
            chosen = found.nonzero()[0].tolist()
            counts = found[chosen].tolist()
            weights = weights[order]
            inputs = list(torch.from_numpy(x[order // topk]).split_with_sizes(counts))
        w1, w3, w2 = (weight.t() for weight in self._shared)
        counts.append(tokens)
        inter = w1.shape[1]
        gate_up = np.empty((pairs + tokens, 2 * inter), np.float32)
        *parts, last = torch.from_numpy(gate_up).split_with_sizes(counts)
        for expert, rows, part in zip(chosen, inputs, parts, strict=True):
            torch.mm(rows, self._w13[expert], out=part)
        gate, up = last.split(inter, 1)
        torch.mm(whole, w1, out=gate)
        torch.mm(whole, w3, out=up)
        hidden = self._round.activation(small_cpu.swiglu(gate_up, self._limit, weights))
        values = np.empty((pairs + tokens, y.shape[1]), np.float32)
        *inputs, last = torch.from_numpy(hidden).split_with_sizes(counts)
        *parts, out_last = torch.from_numpy(values).split_with_sizes(counts)
        torch.mm(last, w2, out=out_last)
        for expert, rows, part in zip(chosen, inputs, parts, strict=True):
            torch.mm(rows, self._w2[expert], out=part)
        if tokens == 1:
            total: np.ndarray = np.add.reduce(values, 0, keepdims=True)
            return total
        routed = values[:pairs]
        if order is not None:
            routed = np.empty_like(routed)
            routed[order] = values[:pairs]
        out: np.ndarray = routed.reshape(tokens, topk, -1).sum(1)
        out += values[pairs:]
        return out


class _EngramViews:
    """Twin of `Engram` for text."""

    def __init__(self, engram: Engram) -> None:
        self._round = _Rounding(engram.rounding)
        self._table, self._wkv = engram.embed.weight, engram.wkv.weight
        self._gains = engram.q_weight.detach().numpy(), engram.k_weight.detach().numpy()
        self._eps = engram.eps

    def run(self, streams: np.ndarray, rows: Tensor) -> np.ndarray:
        found = F.embedding(rows, self._table).flatten(-2).numpy()
        projected = _product(self._round.activation(found), self._wkv)
        return small_cpu.engram_gate(streams, projected, *self._gains, self._eps)


class _Rounding:
    """Twin of `Rounding` for what is rounded here."""

    def __init__(self, rounding: Rounding) -> None:
        self._level = rounding.level

    def activation(self, x: np.ndarray) -> np.ndarray:
        return small_cpu.round_fp8(x) if self._level == "full" else x

    def bottleneck_and_window(
        self, bottleneck: np.ndarray, rows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """An input of linears and window rows, which have the same format, at once."""
        if self._level == "full":
            both, width = np.concatenate((bottleneck, rows), 1), bottleneck.shape[1]
            both = small_cpu.round_fp8(both)
            return both[:, :width], both[:, width:]
        return bottleneck, rows if self._level == "none" else small_cpu.round_fp8(rows)


class _Transposed:
    """The transposed matrices of a stack; those of a packed stack are dequantised one at a time."""

    def __init__(self, stack: Tensor) -> None:
        self._stack = stack
        self._views = list(stack.transpose(1, 2)) if type(stack) is nn.Parameter else None

    def __getitem__(self, index: int) -> Tensor:
        return self._stack[index].t() if self._views is None else self._views[index]


def _product(x: np.ndarray, weight: Tensor) -> np.ndarray:
    out: np.ndarray = F.linear(torch.from_numpy(x), weight).numpy()
    return out
