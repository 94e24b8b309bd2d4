"""Plots of plans, attention, routing and drafts, for notebooks.

Every function takes arrays or the dataclasses of `deepinfer.core`, an optional `ax`, and returns the Axes. Needs
matplotlib, which loads when the first plot is drawn; importing this package needs NumPy only.
"""

from __future__ import annotations

from deepinfer.viz.acceptance import plot_acceptance as plot_acceptance
from deepinfer.viz.attention import plot_attention_mass as plot_attention_mass
from deepinfer.viz.attention import plot_selected_rows as plot_selected_rows
from deepinfer.viz.distance import plot_error_by_distance as plot_error_by_distance
from deepinfer.viz.drafting import plot_reliability as plot_reliability
from deepinfer.viz.drafting import plot_throughput as plot_throughput
from deepinfer.viz.experts import plot_expert_load as plot_expert_load
from deepinfer.viz.fleet import plot_engine_load as plot_engine_load
from deepinfer.viz.fleet import plot_latency as plot_latency
from deepinfer.viz.gantt import TimedStep as TimedStep
from deepinfer.viz.gantt import plot_gantt as plot_gantt
from deepinfer.viz.mask import plot_mask_sizes as plot_mask_sizes
from deepinfer.viz.matrix import plot_matrix as plot_matrix
from deepinfer.viz.plans import plot_plans as plot_plans
from deepinfer.viz.spans import Span as Span
from deepinfer.viz.spans import plot_spans as plot_spans
from deepinfer.viz.style import COLORS as COLORS
from deepinfer.viz.style import use_style as use_style

__all__ = [
    "COLORS",
    "Span",
    "TimedStep",
    "plot_acceptance",
    "plot_attention_mass",
    "plot_engine_load",
    "plot_error_by_distance",
    "plot_expert_load",
    "plot_gantt",
    "plot_latency",
    "plot_mask_sizes",
    "plot_matrix",
    "plot_plans",
    "plot_reliability",
    "plot_selected_rows",
    "plot_spans",
    "plot_throughput",
    "use_style",
]
