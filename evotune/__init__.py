"""evotune: automatic design of GPU kernels that can be trusted."""

from evotune import _checkout

__version__ = "0.1.0"

_checkout.activate()
