"""The channel inside one process: messages are calls."""

from router.channel.client import SchedulerClient
from router.channel.codec import FRONT_DECODER, SCHEDULER_DECODER, encode
from router.channel.host import FrontLink, SchedulerHost
from router.channel.messages import FrontMessage, SchedulerMessage


def connect(client: SchedulerClient, host: SchedulerHost, *, encoded: bool = False) -> FrontLink:
    """Connect a front with the scheduler in its process. Messages arrive before the call that sends them returns.

    `encoded`: whether to encode and decode every message, as between processes. For tests: what could not cross a
    process boundary then fails.
    """

    def deliver(message: SchedulerMessage) -> None:
        client.receive(SCHEDULER_DECODER.decode(encode(message)))

    def send(message: FrontMessage) -> None:
        link.receive(FRONT_DECODER.decode(encode(message)))

    link = host.connect(deliver if encoded else client.receive)
    client.connect(send if encoded else link.receive)
    return link
