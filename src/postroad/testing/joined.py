"""A database whose transactions are savepoints in a test's own transaction."""

from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.engine import URL

from postroad.model.clock import Clock
from postroad.store import borrowed
from postroad.store.database import Asked, Database
from postroad.store.executor import Inline

R = TypeVar("R")


class JoinedDatabase(Database):
    """Every transaction is a savepoint on one connection that somebody else begins, commits or rolls back."""

    def __init__(self, conn: Connection, *, clock: Clock, schema: str | None = None) -> None:
        borrowed.check_joined(conn)
        super().__init__(conn.engine, schema=schema, clock=clock, executor=Inline())
        self._conn = conn

    def close(self) -> None:
        """The connection stays as it is: it is not ours."""

    @staticmethod
    def _check(engine: Engine | str | URL) -> Engine:
        assert isinstance(engine, Engine)
        return engine

    def _once(self, asked: Asked[R]) -> R:
        conn = self.bind(self._conn)
        with conn.begin_nested():
            return asked.carry_out(conn, self.clock)

    def _read(self, fn: Callable[..., R], args: Any, kwargs: Any) -> R:
        return fn(self.bind(self._conn), *args, **kwargs)
