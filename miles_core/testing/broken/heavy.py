"""An entry module that imports torch at its top, which no plugin may do. Nothing imports it but the suite."""

from importlib import import_module

import_module("torch")
