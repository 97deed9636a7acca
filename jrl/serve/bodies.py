"""Fields of requests: pydantic models that check them, and from which the OpenAPI document is generated.

Observations and actions are parsed later, by the spaces of the episode's policy. Here they refer to a component of the
document, which `openapi` builds from the spaces.
"""

import functools
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import numpy as np
import pydantic
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, StringConstraints, WithJsonSchema

from jrl.serve.space_values import LARGEST, parse_number
from jrl.serve.wire import MAX_NAME, RequestError

MAX_STEPS = 256  # steps of local inference in one request, so that other clients do not wait for the request
MAX_INFOS, MAX_INFO_NAME = 32, 64  # infos in a request, and characters of an info's name
_NUMBER: dict[str, Any] = {"type": "number", "minimum": -LARGEST, "maximum": LARGEST}


def _parse_number(x: Any, info: pydantic.ValidationInfo) -> float:
    return parse_number(x, str(info.field_name))


def _check_printable(x: str) -> str:
    if not x.isprintable():
        raise ValueError("expected printable characters")
    return x


def _parse_infos(x: Any) -> dict[str, float]:
    if not isinstance(x, Mapping) or len(x) > MAX_INFOS:
        raise RequestError(422, f"infos: expected a mapping of at most {MAX_INFOS} names to numbers, got {str(x)[:80]}")
    for name in x:
        if not (0 < len(name) <= MAX_INFO_NAME and name.isprintable()):
            raise RequestError(422, f"infos: expected names of 1 to {MAX_INFO_NAME} characters, got {name[:80]!r}")
    return {name: parse_number(value, f"infos/{name}") for name, value in x.items()}


def component(name: str) -> WithJsonSchema:
    """Returns the annotation of a field whose schema is a component of the OpenAPI document."""
    return WithJsonSchema({"component": name})  # pydantic refuses references into another document


def _list_schema(inner: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": inner, "minItems": 1, "maxItems": MAX_STEPS}


_PHRASES = (
    ("Input should be", "expected"), ("String should have", "expected"), ("Value error, ", ""),
    ("a valid dictionary", "a mapping"), ("a valid ", "a "),
)  # fmt: skip
Number = Annotated[float, PlainValidator(_parse_number), WithJsonSchema(_NUMBER)]
Reward = Annotated[Number, WithJsonSchema({**_NUMBER, "description": "reward since the latest action"})]
Flag = Annotated[bool, Field(strict=True)]
Step = Annotated[int, Field(
    strict=True, ge=0, le=2**31 - 1, description="number of the step; a repeated request counts once",
)]  # fmt: skip
Version = Annotated[int, Field(ge=0, description="number of updates before the weights that chose the action")]
Name = Annotated[
    str, StringConstraints(min_length=1, max_length=MAX_NAME), pydantic.AfterValidator(_check_printable),
    Field(description="printable characters"),
]  # fmt: skip
Infos = Annotated[dict[str, float], PlainValidator(_parse_infos), WithJsonSchema({
    "type": "object", "additionalProperties": {**_NUMBER, "type": ["number", "boolean"]}, "maxProperties": MAX_INFOS,
    "propertyNames": {"minLength": 1, "maxLength": MAX_INFO_NAME},
    "description": "numbers whose means are columns of result rows; names are printable, and have no / in npz",
})]  # fmt: skip
Ids = Annotated[list[str], BeforeValidator(lambda x: x.tolist() if isinstance(x, np.ndarray) else x), component("Ids")]
Observation = Annotated[Any, component("Observation")]
Observations = Annotated[Any, component("Observations")]
ObservationRows = Annotated[Any, component("ObservationRows")]
Action = Annotated[Any, component("Action")]
Actions = Annotated[Any, component("Actions")]
AgentObservations = Annotated[dict[str, Any], component("AgentObservations")]
AgentActions = Annotated[dict[str, Any], component("AgentActions")]
AgentNumbers = Annotated[dict[str, Any], component("AgentNumbers")]
AgentFlags = Annotated[dict[str, Flag], component("AgentFlags")]
Numbers = Annotated[Any, component("Numbers")]
Flags = Annotated[Any, component("Flags")]
NumberRows = Annotated[Any, WithJsonSchema(_list_schema(_list_schema(_NUMBER)))]
FlagRows = Annotated[Any, WithJsonSchema(_list_schema(_list_schema({"type": "boolean"})))]
VersionRows = Annotated[Any, WithJsonSchema(_list_schema(_list_schema({"type": "integer", "minimum": 0})))]


class Body(BaseModel):
    """Fields of a request."""

    model_config = ConfigDict(extra="forbid")


_Body = TypeVar("_Body", bound=Body)


def parse_body(kind: type[_Body], fields: Mapping[str, Any]) -> _Body:
    """Returns the checked fields of a request. Raises RequestError: 400: unknown or missing field; 422: wrong value."""
    try:
        return kind.model_validate(fields)
    except pydantic.ValidationError as e:
        faults = e.errors(include_url=False)
    fault = next((each for each in faults if each["type"] == "extra_forbidden"), faults[0])
    name = "/".join(str(part)[:80] for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        raise RequestError(400, f"{name}: unknown field: expected {', '.join(kind.model_fields) or 'none'}")
    if fault["type"] == "missing":
        raise RequestError(400, f"{name} is missing")
    expected = functools.reduce(lambda text, phrase: text.replace(*phrase), _PHRASES, fault["msg"])
    raise RequestError(422, f"{name}: {expected}, got {str(fault['input'])[:80]!r}")


class ActionRequest(Body):
    observation: Observation
    reward: Reward = 0.0
    step: Step | None = None
    infos: Infos = {}


class BeginRequest(Body):
    episode_id: Name | None = None
    training_enabled: Flag = True
    count: Annotated[int, Field(strict=True, ge=1), component("Count")] | None = None
    policy: Name | None = None


class LogRequest(ActionRequest):
    action: Action
    log_prob: Number = 0.0


class RewardRequest(Body):
    reward: Reward
    infos: Infos = {}


class AgentRewardRequest(Body):
    rewards: AgentNumbers
    infos: Infos = {}


class EndRequest(ActionRequest):
    truncated: Flag = False


class AgentEndRequest(Body):
    observations: AgentObservations = {}
    rewards: AgentNumbers = {}
    truncated: Flag = False
    step: Step | None = None
    infos: Infos = {}


class TurnRequest(Body):
    observations: AgentObservations
    rewards: AgentNumbers = {}
    terminated: AgentFlags = {}
    truncated: AgentFlags = {}
    actions: AgentActions = {}
    log_probs: AgentNumbers = {}
    step: Step | None = None
    infos: Infos = {}


class TurnsRequest(Body):
    turns: Annotated[dict[str, Any], component("Turns")]


class StepsRequest(Body):
    episode_ids: Ids
    observations: Observations
    rewards: Numbers = None
    terminated: Flags = None
    truncated: Flags = None
    final_observations: Observations = None


class PlayedRequest(Body):
    """Steps [K, N] whose actions the client chose with the server's weights."""

    episode_ids: Ids
    observations: ObservationRows
    actions: Annotated[Any, WithJsonSchema({"description": "[K, N, *] in the policy's units, a tree of arrays"})]
    log_probs: NumberRows
    versions: VersionRows
    rewards: NumberRows = None
    terminated: FlagRows = None
    truncated: FlagRows = None
    final_observations: ObservationRows = None
    memory: Annotated[Any, WithJsonSchema({
        "description": "arrays [K, N, ...] by number: memory of a recurrent policy before each step",
    })] = None  # fmt: skip


class OnceRequest(Body):
    observation: Observation
    policy: Name | None = None
