"""Model configurations as plain data, rendered as Triton's ``config.pbtxt`` and read back.

The text is made by protobuf's own formatter from Triton's own message classes (``model_config.proto``,
shipped with tritonclient), and every text is parsed back before it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from handover.errors import ArtefactError


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of a model.

    Attributes:
        name: as clients send it.
        data_type: Triton's name without its prefix: UINT32, INT32, UINT64, FP32, FP16, BOOL, STRING.
        dims: shape without the batch axis; -1 for any length.
        scalar: the model sees the tensor without its last axis: [batch] though clients send [batch, 1].
        optional: a request may leave it out.
        ragged: requests of different shapes may share a batch.
    """

    name: str
    data_type: str
    dims: tuple[int, ...] = (1,)
    scalar: bool = False
    optional: bool = False
    ragged: bool = False


@dataclass(frozen=True)
class Step:
    """One model of an ensemble; maps from the model's tensor names to the ensemble's."""

    model_name: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


@dataclass(frozen=True)
class SequenceSpec:
    """How Triton keeps the requests of one conversation together.

    Attributes:
        max_sessions: conversations at a time; a further one waits. 1 is Triton's direct strategy, more the oldest.
        idle_timeout_us: microseconds without a request after which a conversation is over.
    """

    max_sessions: int
    idle_timeout_us: int


@dataclass(frozen=True)
class ModelSpec:
    """Everything that a ``config.pbtxt`` of ours says.

    Attributes:
        name: equals the model's directory.
        max_batch_size: requests in a batch at most.
        inputs, outputs: the model's interface.
        backend: Triton backend; empty for an ensemble.
        steps: of an ensemble; empty for a model.
        parameters: passed to the backend as text.
        default_model_filename: what FasterTransformer's backend falls back to for its weights.
        max_queue_delay_us: microseconds a request may wait for company; None: no dynamic batching.
        decoupled: several responses for one request; None: the model has no transaction policy.
        shape_inputs: ragged inputs whose item shapes the model wants as ``<name>_item_shape``.
        sequence: of a stateful model, which has no dynamic batching; None: requests are independent.
        instances: of the model, which work side by side.
    """

    name: str
    max_batch_size: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    backend: str = ""
    steps: tuple[Step, ...] = ()
    parameters: Mapping[str, str] = field(default_factory=dict)
    default_model_filename: str = ""
    max_queue_delay_us: int | None = None
    decoupled: bool | None = None
    shape_inputs: tuple[str, ...] = ()
    sequence: SequenceSpec | None = None
    instances: int = 1


def to_message(spec: ModelSpec) -> model_config_pb2.ModelConfig:
    """Build Triton's message."""
    config = model_config_pb2.ModelConfig(
        name=spec.name,
        backend=spec.backend,
        platform="ensemble" if spec.steps else "",
        default_model_filename=spec.default_model_filename,
        max_batch_size=spec.max_batch_size,
        input=[_input(tensor) for tensor in spec.inputs],
        output=[_output(tensor) for tensor in spec.outputs],
        parameters={key: model_config_pb2.ModelParameter(string_value=value) for key, value in spec.parameters.items()},
    )
    _add_batching(config, spec)
    for step in spec.steps:
        config.ensemble_scheduling.step.add(
            model_name=step.model_name, model_version=-1, input_map=step.inputs, output_map=step.outputs
        )
    if not spec.steps:
        # FasterTransformer's backend accepts KIND_CPU only: it places its own work on the GPUs.
        config.instance_group.add(count=spec.instances, kind=model_config_pb2.ModelInstanceGroup.KIND_CPU)
    return config


def to_text(spec: ModelSpec, comment: str = "") -> str:
    """Render a ``config.pbtxt`` and prove that Triton's parser reads the same message back.

    Args:
        spec: the configuration.
        comment: lines for the head of the file, without the leading ``#``.
    """
    message = to_message(spec)
    head = "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines())
    text = head + text_format.MessageToString(message, as_utf8=True)
    if parse(text) != message:
        raise ArtefactError(f"the configuration of '{spec.name}' does not survive protobuf's text format")
    return text


def parse(text: str, source: str = "config.pbtxt") -> model_config_pb2.ModelConfig:
    """Parse a ``config.pbtxt`` with the official parser.

    Raises:
        ArtefactError: the text is no model configuration; the message carries line and column.
    """
    try:
        return text_format.Parse(text, model_config_pb2.ModelConfig())
    except text_format.ParseError as error:
        raise ArtefactError(f"{source} is not a Triton model configuration: {error}") from error


def _data_type(name: str) -> int:
    return int(model_config_pb2.DataType.Value(f"TYPE_{name}"))


def _input(tensor: TensorSpec) -> model_config_pb2.ModelInput:
    return model_config_pb2.ModelInput(
        name=tensor.name,
        data_type=_data_type(tensor.data_type),
        dims=tensor.dims,
        reshape=model_config_pb2.ModelTensorReshape(shape=tensor.dims[:-1]) if tensor.scalar else None,
        optional=tensor.optional,
        allow_ragged_batch=tensor.ragged,
    )


def _output(tensor: TensorSpec) -> model_config_pb2.ModelOutput:
    return model_config_pb2.ModelOutput(name=tensor.name, data_type=_data_type(tensor.data_type), dims=tensor.dims)


def _add_batching(config: model_config_pb2.ModelConfig, spec: ModelSpec) -> None:
    if spec.decoupled is not None:
        config.model_transaction_policy.SetInParent()
        config.model_transaction_policy.decoupled = spec.decoupled
    if spec.max_queue_delay_us is not None:
        config.dynamic_batching.SetInParent()
        config.dynamic_batching.max_queue_delay_microseconds = spec.max_queue_delay_us
    if spec.sequence is not None:
        _add_sequence_batching(config, spec.sequence)
    for name in spec.shape_inputs:
        config.batch_input.add(
            kind=model_config_pb2.BatchInput.BATCH_ITEM_SHAPE,
            target_name=[f"{name}_item_shape"],
            data_type=_data_type("INT32"),
            source_input=[name],
        )


def _add_sequence_batching(config: model_config_pb2.ModelConfig, sequence: SequenceSpec) -> None:
    batching, control = config.sequence_batching, model_config_pb2.ModelSequenceBatching.Control
    batching.max_sequence_idle_microseconds = sequence.idle_timeout_us
    if sequence.max_sessions == 1:
        batching.direct.SetInParent()
    else:
        batching.oldest.max_candidate_sequences = sequence.max_sessions
    for name in ("START", "END"):
        kind = control.Kind.Value(f"CONTROL_SEQUENCE_{name}")
        batching.control_input.add(name=name).control.add(kind=kind, int32_false_true=(0, 1))
