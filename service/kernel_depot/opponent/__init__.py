"""FlashInfer's ragged prefill, to be measured against: behind two gates, never on a default path."""

from kernel_depot.opponent.gates import SWITCH, available
from kernel_depot.opponent.ragged_prefill import ragged_prefill_bf16_hd128, ragged_prefill_bf16_hd256

__all__ = ["SWITCH", "available", "ragged_prefill_bf16_hd128", "ragged_prefill_bf16_hd256"]
