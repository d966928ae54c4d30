"""Checks: once a second the list of replicas is looked at, and each replica is asked for its health."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterable

import httpx

from openk3.fleet.answer import is_own_lack
from openk3.fleet.replica_list import Listed, ReplicaList
from openk3.fleet.router import Router

LOG = logging.getLogger(__name__)
MOST_BYTES = 4096  # of what a replica says of its health


class Checks:
    """Tells a router's policy who belongs to the fleet and who is well."""

    def __init__(self, router: Router, replicas: ReplicaList) -> None:
        self._router, self._policy, self._list = router, router.policy, replicas
        self._times = router.proxy
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read the list, check every replica once, and go on doing both."""
        self._client = httpx.AsyncClient(timeout=self._times.check_seconds, trust_env=False, follow_redirects=False)
        self.update(self._list.changed() or [])
        await self.check_all()
        self._task = asyncio.create_task(self._keep_checking())

    async def stop(self) -> None:
        """No more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._client.aclose()

    def update(self, listed: Iterable[Listed]) -> None:
        """These are the fleet's replicas now; others get nothing more."""
        wanted = {one.url: one for one in listed}
        for name in [name for name, one in self._policy.replicas.items() if name not in wanted and not one.is_leaving]:
            LOG.info("%s leaves", name)
            self._policy.remove(name)
        for url, one in wanted.items():
            if url not in self._policy.replicas or self._policy.replicas[url].is_leaving:
                LOG.info("%s joins", url)
            self._policy.add(url, weight=one.weight)
            self._policy.hold(url, one.is_held)
        self._router.wake()

    async def _keep_checking(self) -> None:
        while True:
            await asyncio.sleep(self._times.check_every_seconds)
            try:
                listed = self._list.changed()
                if listed is not None:
                    self.update(listed)
                await self.check_all()
                await self._router.lanes.sweep()
            except Exception:  # the next round may be better; without checks no replica would ever come back
                LOG.exception("checking the replicas failed")

    async def check_all(self) -> None:
        """One health check of each replica."""
        await asyncio.gather(*(self._check(name) for name in list(self._policy.replicas)))
        self._router.wake()

    async def _ask(self, name: str) -> tuple[int, bytes]:
        """Status of /health, and the beginning of what it says."""
        body = b""
        async with self._client.stream("GET", f"{name}/health", headers={"accept-encoding": "identity"}) as answer:
            async for data in answer.aiter_raw():
                body += data
                if len(body) > MOST_BYTES:
                    break
        return answer.status_code, body

    async def _check(self, name: str) -> None:
        is_good = is_draining = False
        try:
            async with asyncio.timeout(self._times.check_seconds):
                status, body = await self._ask(name)
            is_draining = status == 503 and json.loads(body).get("status") == "draining"
            is_good = status == 200 or is_draining
        except Exception as error:  # whatever it is: one replica's checks end nobody else's
            if is_own_lack(error):
                LOG.error("%s cannot be checked: %s", name, error)
                return
        replica = self._policy.replicas.get(name)
        if replica is not None and replica.checked(is_good, is_draining=is_draining):
            LOG.log(logging.INFO if replica.state == "healthy" else logging.WARNING, "%s is %s", name, replica.state)
            if replica.state == "failed":
                self._router.abandon(name)
