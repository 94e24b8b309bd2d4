"""Experts onto GPUs by their loads, with the signature and the maps of DeepSeek's expert-parallel load balancer."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from deepinfer.balancers.expert_parallel._arrays import FloatArray, IntArray, like, loads
from deepinfer.balancers.expert_parallel.greedy import greedy_packing, greedy_placement
from deepinfer.balancers.expert_parallel.imbalance import gpu_loads
from deepinfer.balancers.expert_parallel.maps import copies_of, count_copies, slots_of
from deepinfer.balancers.expert_parallel.packing import swap_down
from deepinfer.balancers.expert_parallel.refine import refined_placement, spread_placement
from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError

__all__ = ["Mode", "place_experts", "rebalance_experts"]

Mode = Literal["best", "compatible"]
_INT_MAX = 2**31 - 1


def rebalance_experts(
    weight: Any,
    num_replicas: int,
    num_groups: int,
    num_nodes: int,
    num_gpus: int,
    *,
    mode: Mode = "best",
    group_limited: bool | None = None,
) -> tuple[Any, Any, Any]:
    """Chooses how many copies each expert has, and which GPU holds which.

    Drop-in for the function of the same name in DeepSeek's EPLB: same arguments, same three maps.

    Args:
        weight: Load of each expert, shape [layers, experts], any number type; an array, a torch tensor, or nested
            lists. Counts over a window of steps, summed over all ranks.
        num_replicas: Slots in all, from `experts`, a multiple of `num_gpus`.
        num_groups: Groups of consecutive experts of a router that picks groups first; 1 for any other router.
        num_nodes: Nodes.
        num_gpus: GPUs in all, a multiple of `num_nodes`.
        mode: `"compatible"` gives the published algorithm's result bit for bit. `"best"` balances at least as well,
            except where the published result has two copies of an expert on one GPU, which `"best"` never does.
        group_limited: Whether the experts of a group must stay on one node. None: when there are several groups and
            nodes, and the groups divide among the nodes. It costs balance, and is of use only with a router that sends
            a token to few groups. Ignored by `"compatible"`.

    Returns:
        `phy2log`, expert in each slot, shape [layers, num_replicas]; slot s is on GPU s // (num_replicas / num_gpus).
        `log2phy`, slots of each expert, shape [layers, experts, most copies], -1 behind the last one. `logcnt`, copies
        of each expert, shape [layers, experts]. All int64; tensors on the CPU when `weight` is a tensor, else arrays.

    Raises:
        ConfigError: A number is out of range or does not divide another.
        ShapeError: `weight` is no matrix of numbers from 0 to 1e30.

    Notes:
        Deterministic; equal loads go by index. In mode `"best"` the copies of an expert are on different GPUs (unless a
        GPU has more slots than there are experts), and a layer without load has its experts in order.

    Examples:
        >>> weight = [[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86]]
        >>> phy2log, log2phy, logcnt = rebalance_experts(weight, 16, 4, 2, 8, mode="compatible")
        >>> logcnt.tolist()
        [[1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1]]
    """
    array = loads("weight", weight)
    checks.check_choice("mode", mode, ("best", "compatible"), ConfigError)
    _check_sizes(array.shape[1], num_replicas, num_groups, num_nodes, num_gpus)
    if mode == "compatible":
        nested = num_groups % num_nodes == 0
        groups, nodes = (num_groups, num_nodes) if nested else (1, 1)
        phy2log, copy = greedy_placement(
            array.astype(np.float32), num_replicas, groups, nodes, num_gpus
        )
        counts = count_copies(phy2log, array.shape[1])
        maps = (phy2log, slots_of(phy2log, copy, counts), counts)
    else:
        phy2log = place_experts(
            array,
            num_replicas,
            num_gpus,
            num_groups=num_groups,
            num_nodes=num_nodes,
            group_limited=group_limited,
        )
        counts = count_copies(phy2log, array.shape[1])
        maps = (phy2log, slots_of(phy2log, copies_of(phy2log), counts), counts)
    return like(weight, maps[0]), like(weight, maps[1]), like(weight, maps[2])


def place_experts(
    weight: Any,
    num_replicas: int,
    num_gpus: int,
    *,
    num_groups: int = 1,
    num_nodes: int = 1,
    group_limited: bool | None = None,
    for_splitter: bool = False,
) -> IntArray:
    """The best placement for loads, as one map; see `rebalance_experts`.

    Args:
        weight: Load of each expert, shape [layers, experts].
        num_replicas: Slots in all.
        num_gpus: GPUs in all.
        num_groups: Groups of consecutive experts.
        num_nodes: Nodes.
        group_limited: Whether the experts of a group must stay on one node.
        for_splitter: Whether a `TokenSplitter` will divide the tokens of each step. Every GPU then gets a part of the
            load that has copies elsewhere, which costs at most a little of the planned balance and makes the realised
            one much better. Ignored when groups stay on a node.

    Returns:
        Expert in each slot, shape [layers, num_replicas], int64.

    Raises:
        ConfigError: A number is out of range or does not divide another.
        ShapeError: `weight` is no matrix of finite numbers from 0.
    """
    array = loads("weight", weight)
    _check_sizes(array.shape[1], num_replicas, num_groups, num_nodes, num_gpus)
    nested = num_groups > 1 and num_nodes > 1 and num_groups % num_nodes == 0
    if group_limited and not nested and num_nodes > 1:
        raise ConfigError(
            f"{num_groups} groups cannot be divided among {num_nodes} nodes; with group_limited=True the "
            "groups must be a multiple of the nodes.",
            field="num_groups",
            value=num_groups,
            limit=f"a multiple of {num_nodes}",
        )
    if not nested or group_limited is False:
        place = spread_placement if for_splitter else refined_placement
        return place(array, num_replicas, num_gpus)
    return _nested_placement(array, num_replicas, num_groups, num_nodes, num_gpus)


def _nested_placement(
    weight: FloatArray, num_slots: int, num_groups: int, num_nodes: int, num_gpus: int
) -> IntArray:
    """Groups to nodes, then each node by itself; never worse than greedy in the same form."""
    layers = len(weight)
    per_group = weight.reshape(layers, num_groups, -1).sum(2)
    pack, place = greedy_packing(per_group.astype(np.float32), num_nodes)
    width = num_groups // num_nodes
    greedy = np.empty_like(pack)
    groups = np.broadcast_to(np.arange(num_groups), pack.shape)
    np.put_along_axis(greedy, pack * width + place, groups, 1)
    swapped = greedy.reshape(layers, num_nodes, width).copy()
    size = np.take_along_axis(per_group, greedy, 1).reshape(swapped.shape)
    swap_down(swapped, size, per_group.sum(1) / num_nodes, rounds=2 * num_nodes)

    result = _place_in_nodes(weight, swapped.reshape(layers, -1), num_slots, num_nodes, num_gpus)
    published, _ = greedy_placement(
        weight.astype(np.float32), num_slots, num_groups, num_nodes, num_gpus
    )
    limit = gpu_loads(weight, published, num_gpus).max(1)
    worse = np.flatnonzero(gpu_loads(weight, result, num_gpus).max(1) > limit)
    if worse.size:
        again = _place_in_nodes(weight[worse], greedy[worse], num_slots, num_nodes, num_gpus)
        reached = gpu_loads(weight[worse], again, num_gpus).max(1)
        better = reached < gpu_loads(weight[worse], result[worse], num_gpus).max(1)
        result[worse[better]] = again[better]
    return result


def _place_in_nodes(
    weight: FloatArray, groups: IntArray, num_slots: int, num_nodes: int, num_gpus: int
) -> IntArray:
    """Places the groups of each node, given in the order of nodes, shape [layers, groups], on its GPUs."""
    layers, experts = weight.shape
    size = experts // groups.shape[1]
    ids = (groups[:, :, None] * size + np.arange(size)).reshape(layers * num_nodes, -1)
    inner = np.take_along_axis(weight, ids.reshape(layers, -1), 1).reshape(ids.shape)
    placed = refined_placement(inner, num_slots // num_nodes, num_gpus // num_nodes)
    return np.take_along_axis(ids, placed, 1).reshape(layers, num_slots)


def _check_sizes(
    experts: int, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> None:
    for name, value in (
        ("num_groups", num_groups),
        ("num_nodes", num_nodes),
        ("num_gpus", num_gpus),
    ):
        checks.check_int(name, value, 1, _INT_MAX, ConfigError)
    hint = f"There are {experts} experts, and each needs a slot."
    checks.check_int("num_replicas", num_replicas, experts, _INT_MAX, ConfigError, hint)
    for name, value, divisor_name, divisor in (
        ("num_replicas", num_replicas, "num_gpus", num_gpus),
        ("num_gpus", num_gpus, "num_nodes", num_nodes),
        ("the number of experts", experts, "num_groups", num_groups),
    ):
        if value % divisor:
            raise ConfigError(
                f"{name} is {value}, which {divisor_name} = {divisor} does not divide; "
                f"use a multiple of {divisor}.",
                field=name,
                value=value,
                limit=f"a multiple of {divisor}",
            )
