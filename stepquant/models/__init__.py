"""Delta-rule checkpoints: families, loading, trace capture, calibration text, and the built-in tiny models."""
