"""Into how many equal parts a model can be cut (tensor parallelism), by its shape alone. Torch-free: known before anything starts."""

from __future__ import annotations

from twostep.errors import SetupError

# The parts are devices of one host.
_MOST = 16


def check_parts(size: int, *, num_heads: int, num_kv_heads: int, num_experts: int = 0, **widths: int) -> None:
    """Raises SetupError, saying which sizes would do, if the model cannot be cut into `size` equal parts. `widths`: of what is cut in
    MLPs, by config.json's name; 0: nothing is. `num_experts`: of which each part has whole ones; 0: it has none."""

    def wrong(size: int) -> str:
        for name, value in (("num_attention_heads", num_heads), *widths.items()):
            if value % size:
                return f"does not divide the model's {name} ({value})"
        if 0 < num_experts < size:
            return f"is more than the model's num_experts ({num_experts})"
        if num_kv_heads % size and size % num_kv_heads:
            return f"neither divides the model's num_key_value_heads ({num_kv_heads}) nor is a multiple of it"
        return ""

    if why := wrong(size):
        sizes = ", ".join(str(each) for each in range(1, _MOST + 1) if not wrong(each))
        raise SetupError(f"--tensor-parallel-size {size} {why}; give one of {sizes}")
