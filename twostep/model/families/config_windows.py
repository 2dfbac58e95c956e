"""Attention windows out of config.json: which layers see only the last so many keys."""

from __future__ import annotations

from twostep.model.families.config_fields import Fields

FULL, SLIDING = "full_attention", "sliding_attention"

# transformers' own defaults. An old Mistral config without the key means a window of 4096.
_DEFAULT_WINDOW = 4096
_DEFAULT_FULL_LAYERS = 28


def parse_windows(fields: Fields, architecture: str, num_layers: int, max_model_len: int) -> tuple[int, ...]:
    """Keys that a query of each layer sees, its own included; 0: all. A window at least as long as the context is none.

    As transformers has it: llama has no windows; mistral's `sliding_window` holds for all layers; qwen's only with
    `use_sliding_window`, for the layers that `layer_types` names, or else for those from `max_window_layers` on.
    Raises SetupError, naming the key, for what contradicts itself or is not supported.
    """
    switchable = architecture in ("qwen2", "qwen3")
    window = fields.take("sliding_window", None if architecture == "llama" else _DEFAULT_WINDOW)
    full_layers = 0
    if switchable:
        full_layers = fields.take("max_window_layers", _DEFAULT_FULL_LAYERS)
        if not isinstance(full_layers, int) or isinstance(full_layers, bool) or full_layers < 0:
            fields.refuse("max_window_layers", full_layers, "it must be a whole number from 0 on")
        if not fields.boolean("use_sliding_window", False):
            window = None
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        fields.refuse("sliding_window", window, "it must be a positive whole number or null")
    if architecture == "llama" and window is not None and window < max_model_len:
        fields.refuse("sliding_window", window, "llama has none; set it to null, or name the architecture that has it")

    sliding = [window is not None and i >= full_layers for i in range(num_layers)]
    layer_types = fields.take("layer_types", None)
    if layer_types is not None:
        _check_types(fields, layer_types, num_layers)
        named = [kind == SLIDING for kind in layer_types]
        if any(named) and window is None:
            fields.refuse("layer_types", SLIDING, "but no sliding_window is in use; give one, or full_attention layers only")
        if not switchable and named != sliding:
            fields.refuse("layer_types", layer_types, f"it contradicts sliding_window, which {architecture} uses in all layers or none")
        sliding = named
    if window is None or window >= max_model_len:
        return (0,) * num_layers
    return tuple(window if on else 0 for on in sliding)


def _check_types(fields: Fields, layer_types: object, num_layers: int) -> None:
    if not isinstance(layer_types, list):
        fields.refuse("layer_types", layer_types, f"it must be a list of {FULL} and {SLIDING}")
    for kind in layer_types:
        if kind not in (FULL, SLIDING):
            fields.refuse("layer_types", kind, f"only {FULL} and {SLIDING} layers are supported")
    if len(layer_types) != num_layers:
        fields.refuse("layer_types", layer_types, f"it must name num_hidden_layers ({num_layers}) layers")
