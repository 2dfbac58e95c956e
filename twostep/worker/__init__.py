"""Holds what prefill and decode workers share: configuration, the engine's thread, start and stop."""
