"""stepquant: a compiler for the recurrent states of delta-rule models."""

__version__ = "0.1.0"
