"""Whether an engine computes the model that it is given, known from config.ini before a server is started."""

from __future__ import annotations

from deployment.proof.served_models import ServedModel
from deployment.triton.installation import FASTERTRANSFORMER
from ft_format.config_ini import ConfigIni
from ft_format.families import find_family
from ft_format.location import is_hub_directory
from handover.errors import ArtefactError


def check_engine(model: ServedModel, engine: str) -> None:
    """Refuse a model that FasterTransformer's own engine would load and compute wrongly.

    Args:
        model: one of ``find_served_models``.
        engine: that is to serve it.

    Raises:
        ArtefactError: it does not read the directory, or has no kernels for the model.
    """
    if engine != FASTERTRANSFORMER:
        return  # our engine says itself what it does not serve
    if is_hub_directory(model.checkpoint):
        raise ArtefactError(
            f"'{model.name}' is a Hugging Face directory, {model.checkpoint}, which FasterTransformer does not read",
            "take deployment.engine=slipway, or export.model.format=fastertransformer",
        )
    ini = ConfigIni.read(model.checkpoint, ArtefactError)
    family = find_family(ini)
    if family and (problem := family.kernel_problem(family.read(ini, lambda name: True, 1))):
        raise ArtefactError(
            f"FasterTransformer does not compute '{model.name}' in {model.checkpoint}: {problem}",
            "take deployment.engine=slipway",
        )
