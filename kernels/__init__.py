"""The engine's device operations, one a file: Triton kernel, launcher, torch reference.

A launcher (``rms_norm``, ``decode_attention``, ...) checks its arguments and picks the path: CUDA tensors take the
Triton kernel, CPU tensors take torch. ``*_reference`` is the definition in plain torch that both are tested against.
Nothing here knows what a request or a model is.
"""
