"""Memory that the programs of one attention call share, and how many programs a chip runs."""

from __future__ import annotations

import torch


class DecodeWorkspace:
    """What programs hand each other inside one call. Shared by all plans whose calls never overlap (one stream)."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self.parts = torch.empty(0, dtype=torch.float32, device=device)
        self.scales = torch.empty(0, dtype=torch.float32, device=device)
        # All zero between calls: who merges a sequence sets its counter back.
        self.counters = torch.zeros(0, dtype=torch.int32, device=device)

    def reserve(self, *, num_parts: int, head_dim: int, num_counters: int) -> None:
        """Makes room. Plans made before keep the memory they have, so graphs captured with them stay good; least is held where the
        largest batch is planned first."""
        if self.scales.numel() < num_parts * 2:
            self.scales = torch.empty(num_parts * 2, dtype=torch.float32, device=self._device)
        if self.parts.numel() < num_parts * head_dim:
            self.parts = torch.empty(num_parts * head_dim, dtype=torch.float32, device=self._device)
        if self.counters.numel() < num_counters:
            self.counters = torch.zeros(num_counters, dtype=torch.int32, device=self._device)


def num_sms_of(device: torch.device) -> int:
    # The interpreter runs programs one by one: a few show all that many would.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
