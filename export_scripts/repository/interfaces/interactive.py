"""The stateful form of a model: a conversation whose earlier tokens stay in the engine's cache.

Source: FasterTransformer backend's GPT guide, "Interactive Text Generation", and its published repository
``all_models/gpt-interactive-text-generation``. Every tensor gains a first axis of length 1, Triton's batch, so
``[batch, n]`` becomes ``[1, batch, n]``; ``session_len`` and ``memory_len`` come with a conversation's first request.
Text comes back as in the stateless form, one after another.

With one conversation at a time the file says ``direct``, as FasterTransformer's does, and its backend can serve it too.
With more it says ``oldest``, so that conversations run side by side in one copy of the model; FasterTransformer's
backend holds the state of one conversation an instance and must not be given that.
"""

from __future__ import annotations

from dataclasses import replace

from export_scripts.repository.interfaces.serving import declare_inputs
from export_scripts.repository.names import ENGINE
from export_scripts.repository.pbtxt import ModelSpec, SequenceSpec, TensorSpec
from ft_format.tensors import SESSION

_SESSION = declare_inputs(SESSION)
_TEXTS = ("OUTPUT", "OUTPUT_0", "OUTPUT_DELTA")


def make_interactive(spec: ModelSpec, max_sessions: int, idle_timeout_s: float) -> ModelSpec:
    """Turn a model of ``gpt`` into its stateful form.

    Args:
        spec: the engine, an ensemble around it, or a tokenizer model.
        max_sessions: conversations at a time.
        idle_timeout_s: seconds without a request after which a conversation is forgotten.
    """
    speaks_to_engine = spec.backend == ENGINE or any(step.model_name == ENGINE for step in spec.steps)
    passed_on = {tensor.name: tensor.name for tensor in _SESSION}
    session: tuple[TensorSpec, ...] = _SESSION if speaks_to_engine else ()
    if spec.steps:
        session = tuple(replace(tensor, scalar=False) for tensor in session)
    return replace(
        spec,
        max_batch_size=1,
        inputs=tuple(_with_axis(tensor) for tensor in (*spec.inputs, *session)),
        outputs=tuple(_with_axis(tensor) for tensor in spec.outputs),
        max_queue_delay_us=None,
        shape_inputs=(),
        sequence=SequenceSpec(max_sessions, round(idle_timeout_s * 1e6)) if spec.backend == ENGINE else None,
        steps=tuple(
            replace(step, inputs={**step.inputs, **passed_on}) if step.model_name == ENGINE else step
            for step in spec.steps
        ),
    )


def _with_axis(tensor: TensorSpec) -> TensorSpec:
    if tensor.name in _TEXTS:
        return tensor
    return replace(tensor, dims=(-1, *tensor.dims), ragged=False)
