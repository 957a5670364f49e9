"""The families of networks that FasterTransformer serves, one file each.

A family's file says which tensors a model has, with shape and split axis, which keys its ``config.ini`` has, and how
they are read back. The converter writes by it, the deployment proves the files by it before a server is started, and
the engine loads by it. A new family is a file here and its name in ``FAMILIES``.
"""

from __future__ import annotations

from ft_format.config_ini import ConfigIni
from ft_format.families import gpt, gptj, gptneox, llama, t5
from ft_format.families.family import Family

FAMILIES: tuple[Family, ...] = (gpt.FAMILY, gptj.FAMILY, gptneox.FAMILY, llama.FAMILY, t5.FAMILY)
BY_MODEL_TYPE = {name.lower(): family for family in (*FAMILIES, t5.ENCODER) for name in family.model_types}
"""By ``model_type`` of config.pbtxt in lower case."""
MODEL_TYPES = {name: family.name for family in (*FAMILIES, t5.ENCODER) for name in family.model_types}
"""Values of ``model_type`` as FasterTransformer writes them, and the names of the families."""
SECTIONS = tuple(section for family in FAMILIES for section in family.sections)
"""The sections of config.ini of which one tells the family."""


def find_family(ini: ConfigIni) -> Family | None:
    """Tell the family by the sections that are there; None: it is none of FasterTransformer's."""
    return next((family for family in FAMILIES if any(section in ini for section in family.sections)), None)
