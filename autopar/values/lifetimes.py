"""How long does a gathered copy of a parameter live? Four words, which plans and pins use."""

LIFETIMES = ("always", "step", "microbatch", "use")
"""It is never gathered (storage is what is used), it is kept for all micro-batches of a step (ZeRO-1, -2), from forward
to backward, or it is gathered again for backward (ZeRO-3)."""

ONCE_A_STEP = ("always", "step")
"""Lifetimes whose collectives, gradients' included, are paid once a step; others are paid once a micro-batch."""
