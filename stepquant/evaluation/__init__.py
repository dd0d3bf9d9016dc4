"""Evaluation of state codecs on real models: drift, its statistics, and the paper's analyses."""
