"""DeepSeek-V4.1: text model and DSpark draft in plain torch."""

from __future__ import annotations

from deepinfer.models.deepseek_v41.batch import ForwardBatch, ForwardOutput, Segment
from deepinfer.models.deepseek_v41.cache import SlotCache
from deepinfer.models.deepseek_v41.config import DeepseekV41Config, VisionConfig
from deepinfer.models.deepseek_v41.draft import DraftOutput, DSparkDraft
from deepinfer.models.deepseek_v41.full_pass import Truncation
from deepinfer.models.deepseek_v41.model import DeepseekV41
from deepinfer.models.deepseek_v41.narrowing import Narrowing, narrowing_of

__all__ = [
    "DSparkDraft",
    "DeepseekV41",
    "DeepseekV41Config",
    "DraftOutput",
    "ForwardBatch",
    "ForwardOutput",
    "Narrowing",
    "Segment",
    "SlotCache",
    "Truncation",
    "VisionConfig",
    "narrowing_of",
]
