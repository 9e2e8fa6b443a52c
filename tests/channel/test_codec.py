"""Every message survives encoding, and bytes that are no message are refused."""

from typing import get_args

import msgspec
import pytest

from router.channel.codec import FRONT_DECODER, SCHEDULER_DECODER, encode
from router.channel.messages import (
    AdmitNewClient,
    AllReported,
    Answered,
    AnyQuestion,
    Ask,
    Assignment,
    BeginCall,
    CallEnded,
    Continued,
    FieldsRefused,
    FindResponse,
    FrontMeasured,
    FrontMessage,
    FrontMetric,
    IsOfAnother,
    MetricKind,
    PlacementRecord,
    PrefillBeside,
    ProcessLoad,
    RanBefore,
    ResponseChanged,
    ResponseStored,
    Saved,
    SchedulerMessage,
    Settled,
    Superseded,
    TakeInput,
    TicketId,
    Timeouts,
    UnreachableWorker,
    WaitedBefore,
    Withdrawn,
    WorkerCard,
    WorkerChanged,
    WorkerRemoved,
)
from router.core.clients.rate_limits import ClientLimits, OwnerLimits, Shortage
from router.core.model.block_key import BlockKey
from router.core.model.commands import Deficit, Refusal, Reject
from router.core.model.events import (
    Arrived,
    Cancelled,
    Failed,
    Fault,
    Finished,
    HandoffLost,
    Prefilled,
    Progressed,
    Resumed,
    Returned,
    Started,
)
from router.core.model.prompt_key import PromptKey
from router.core.model.request import ClientId, GroupId, Leg, Request, RequestId, Usage, WorkerId

NAME, ANN, WORKER = RequestId("r"), ClientId("ann"), WorkerId("w")
REQUEST = Request(
    NAME,
    ANN,
    "m",
    (PromptKey(b"\x00\xff" * 8, 130, 30), PromptKey(b"", 1)),
    output_limit=5,
    streamed=False,
    weight=0.5,
    blocks=(BlockKey(30, {16: b"\x80" * 8}),),
    body_bytes=9,
    group=GroupId("team"),
    group_weight=2.0,
    answers=2,
    computed_anew_by=frozenset({"vllm"}),
    worker=WORKER,
)
QUESTIONS: list[AnyQuestion] = [
    BeginCall(
        TicketId(1), (OwnerLimits("client ann", ClientLimits(1, 2.5)), OwnerLimits("group x", ClientLimits(), True))
    ),
    TakeInput(TicketId(1), 7),
    AdmitNewClient(ANN, "10.0.0.1", 60.0),
    FindResponse("resp_1", ANN),
    IsOfAnother("resp_1", ANN),
]
FROM_FRONTS: list[FrontMessage] = [
    Arrived(Request(NAME, ANN, "m", ())),
    Arrived(REQUEST),
    Started(NAME),
    Progressed({NAME: 3, RequestId("s"): 2**40}),
    Finished(NAME, Usage(5, 6), (PromptKey(b"12345678", 200),)),
    Failed(NAME, True, Usage(5, 6, 3), Fault.BROKEN),
    Returned(NAME, False, Fault.FULL, begun=True),
    Prefilled(NAME, Usage(10, 1, 4)),
    HandoffLost(NAME),
    Cancelled(NAME),
    WaitedBefore(NAME, REQUEST),
    RanBefore(RequestId("own"), Resumed(REQUEST, WORKER, 7)),
    AllReported(2**40),
    UnreachableWorker(WORKER),
    FieldsRefused(WORKER, "/v1/completions", frozenset({"return_token_ids"})),
    CallEnded(TicketId(1), None),
    ResponseStored("resp_1", ANN, WORKER),
    ResponseChanged("resp_1", deleted=True),
    Superseded(7),
    FrontMeasured(
        (FrontMetric("d2lpm_limited_calls", MetricKind.COUNTER, "Calls.", ("reason",), ((("limit",), 2.0),)),),
        ProcessLoad(1.5, 0.01, 3, 0.001),
    ),
    *[Ask(number, question) for number, question in enumerate(QUESTIONS)],
]
CARD = WorkerCard(
    WORKER,
    "http://w",
    "key",
    healthy=True,
    models=frozenset({"m", "adapter"}),
    parents={"adapter": "m"},
    vocabulary=512,
    context_tokens=4096,
    engine="vllm",
    version="0.32.0",
    refused_fields={"/v1/completions": frozenset({"return_token_ids"})},
    block_tokens=16,
)
PLACEMENT = PlacementRecord(1.5, "longest match", 64, 96, Deficit(order=12.5), 3, 1)
BESIDE = PrefillBeside(WORKER, 64, Timeouts(2.0), PLACEMENT)
FROM_SCHEDULER: list[SchedulerMessage] = [
    Assignment(NAME, WORKER, 64, Timeouts(120.0, 30.0)),
    Assignment(NAME, WORKER, 64, Timeouts(), RequestId("r.2.1")),
    Assignment(NAME, WORKER, 64, Timeouts(), leg=Leg.DECODE, prefill=BESIDE, placement=PLACEMENT),
    Reject(NAME, Refusal.QUEUE_FULL, 1.5),
    Withdrawn(NAME),
    WorkerChanged(CARD),
    WorkerRemoved(WORKER),
    ResponseChanged("resp_1", deleted=False),
    *[Answered(1, answer) for answer in (None, True, WORKER, Shortage("reason", "two", 1.0, True))],
    Saved(12),
    Continued(12),
    Settled(),
]


@pytest.mark.parametrize("message", FROM_FRONTS, ids=lambda message: type(message).__name__)
def test_a_front_message_survives_encoding(message: FrontMessage) -> None:
    """What the scheduler decodes equals what a front has encoded."""
    assert FRONT_DECODER.decode(encode(message)) == message


@pytest.mark.parametrize("message", FROM_SCHEDULER, ids=lambda message: type(message).__name__)
def test_a_scheduler_message_survives_encoding(message: SchedulerMessage) -> None:
    """What a front decodes equals what the scheduler has encoded."""
    assert SCHEDULER_DECODER.decode(encode(message)) == message


def test_every_type_of_message_has_an_example() -> None:
    """So that a new type is tested, too."""
    assert {type(message) for message in FROM_FRONTS} == set(get_args(FrontMessage))
    assert {type(question) for question in QUESTIONS} == set(get_args(AnyQuestion))
    assert {type(message) for message in FROM_SCHEDULER} == set(get_args(SchedulerMessage))


@pytest.mark.parametrize(
    "encoded",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(["Unknown", {}, None]),
        msgspec.msgpack.encode(["Started", {}, None]),
        msgspec.msgpack.encode(["Started", {"request": 7}, None]),
        encode(WorkerRemoved(WORKER)),
    ],
    ids=["nothing", "not MessagePack", "unknown type", "missing field", "wrong type", "other direction"],
)
def test_bytes_that_are_no_message_of_a_front_are_refused(encoded: bytes) -> None:
    """Neither other bytes nor a message of the scheduler pass for a message of a front."""
    with pytest.raises(ValueError, match=r".+"):
        FRONT_DECODER.decode(encoded)
