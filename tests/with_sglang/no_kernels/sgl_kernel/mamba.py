"""Those of layers with states."""

from . import __getattr__ as __getattr__
