"""HTTP to the freight services: dispatches under their Idempotency-Key, and the model behind the decider."""

from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import msgspec

from postroad import Dispatch, GiveUp, RetryLater, Turn
from postroad.demo.asks import Load
from postroad.demo.policy import Decider, Inbound, Plan

# Outside bounds, wider than the senders' own timeouts: those decide.
SECONDS_MAX = 60.0


class HttpCarrier:
    """Posts a dispatch to a service. 5xx and lost connections are tried again, 4xx are final."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def deliver(self, path: str, dispatch: Dispatch[Any]) -> str:
        """Hand the dispatch over; the service's receipt.

        Raises:
            RetryLater: The service could not do it now, or its answer was lost.
            GiveUp: The service refuses it.
        """
        headers = {
            "Idempotency-Key": dispatch.key,
            "Attempt": str(dispatch.attempt),
            "Content-Type": "application/json",
        }
        content = msgspec.json.encode({"to": dispatch.to, "body": dispatch.body})
        async with _client(self._url) as client:
            try:
                response = await client.post(path, content=content, headers=headers)
            except httpx.TransportError as error:
                raise RetryLater(f"{type(error).__name__}: {error}") from error
        if response.status_code >= 500:
            raise RetryLater(f"HTTP {response.status_code}")
        if response.status_code >= 400:
            raise GiveUp(f"HTTP {response.status_code}")
        return str(response.json()["receipt"])


class ModelDecider:
    """Asks a model what it thinks, then lets the rules decide: a slow decider, as real ones are."""

    def __init__(self, url: str, rules: Decider) -> None:
        self._url = url
        self._rules = rules

    async def decide(self, turn: Turn, load: Load, inbound: Inbound) -> Plan:
        """The rules' plan, once the model has answered.

        Raises:
            RetryLater: The model cannot be reached; the turn is tried again.
        """
        async with _client(self._url) as client:
            try:
                headers = {"Idempotency-Key": f"think/{turn.subject}/{inbound.event}"}
                await client.post("/think", headers=headers, content=msgspec.json.encode(inbound))
            except httpx.TransportError as error:
                raise RetryLater(f"the model is away: {error}") from error
        return await self._rules.decide(turn, load, inbound)


def _client(url: str) -> AbstractAsyncContextManager[httpx.AsyncClient]:
    # Plain HTTP on this host: loading certificates would cost more than the request.
    return httpx.AsyncClient(base_url=url, timeout=SECONDS_MAX, verify=False, trust_env=False)
