"""Energy of a GPU, from the driver's own counter (NVML), where there is one."""

from __future__ import annotations

import importlib
import importlib.util
from types import TracebackType
from typing import Any

import torch


class EnergyMeter:
    """Joules that the device took between entering and leaving; None where the driver does not say: a CPU, an older card, or the package
    nvidia-ml-py missing.

        with EnergyMeter(device) as energy:
            ...
        energy.joules
    """

    def __init__(self, device: torch.device) -> None:
        self.joules: float | None = None
        self._nvml: Any = None
        self._handle: Any = None
        self._start: float | None = None
        if device.type != "cuda" or importlib.util.find_spec("pynvml") is None:
            return
        nvml: Any = importlib.import_module("pynvml")
        properties: Any = torch.cuda.get_device_properties(device)
        try:
            nvml.nvmlInit()
            # By name: the driver's numbers do not follow CUDA_VISIBLE_DEVICES.
            self._handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")
        except nvml.NVMLError:
            return
        self._nvml = nvml

    def __enter__(self) -> EnergyMeter:
        self._start = self._read()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        end = self._read()
        self.joules = None if end is None or self._start is None else end - self._start

    def _read(self) -> float | None:
        if self._nvml is None:
            return None
        try:
            return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3
        except self._nvml.NVMLError:
            return None
