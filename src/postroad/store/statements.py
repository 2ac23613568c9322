"""SQL that is written once and runs on SQLite and on Postgres. Every difference of the dialects is a line here.

A statement is text with marks in braces:

    {p}                         the prefix of our tables, with the schema where there is one
    {rows:name(a text, b int)}  the rows of the JSON parameter `name` as a table; it also has `ord`, from 0
    {list:name}                 the strings of the JSON array `name`, as a table with the one column `value`
    {ints:name}                 the integers of the JSON array `name`, likewise
    {in_list:name} {in_ints:name}  "is one of" them, in a form that is always looked up one by one
    {json_agg}                  the aggregate that makes a JSON array
    {for_update} {skip_locked}  row locks, where there are such
    {bytewise}                  the collation of our text columns, for text that a parameter brought
    {now_rows}                  a hint that a CTE is computed once
"""

import re
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import msgspec
from sqlalchemy import Connection, Dialect, text
from sqlalchemy.exc import DBAPIError

from postroad.store.schema import PREFIX

SCHEMA_OPTION = "postroad_schema"
OURS_OPTION = "postroad_ours"
S = TypeVar("S", bound=msgspec.Struct)
Row = Any  # a named tuple of the columns that a statement names
_ROWS = re.compile(r"\{rows:(\w+)\(([^)]*)\)\}")
_LIST = re.compile(r"\{(list|ints|in_list|in_ints):(\w+)\}")


class Found:
    """What a statement found, read to its end at once, so that no cursor stays open; and how many rows it wrote."""

    __slots__ = ("_columns", "_rows", "rowcount")

    def __init__(self, columns: tuple[str, ...], rows: Sequence[Any], rowcount: int) -> None:
        self._columns = columns
        self._rows = rows
        self.rowcount = rowcount

    def __iter__(self) -> Iterator[Any]:
        return iter(self.all())

    def all(self) -> list[Any]:
        """The rows, with their columns as attributes."""
        return list(map(_row_of(self._columns), self._rows))

    def one_or_none(self) -> Any:
        """The one row there may be."""
        return _one(self.all()) if self._rows else None

    def one(self) -> Any:
        """The one row."""
        return _one(self.all())

    def mappings(self) -> list[dict[str, Any]]:
        """The rows as dictionaries by column."""
        return [dict(zip(self._columns, row, strict=True)) for row in self._rows]

    def into(self, form: type[S]) -> list[S]:
        """The rows as structs, whose fields are their columns."""
        return [msgspec.convert(row, form) for row in self.mappings()]

    def scalars(self) -> list[Any]:
        """The first column."""
        return [row[0] for row in self._rows]

    def scalar_one_or_none(self) -> Any:
        """The first column of the one row there may be."""
        return _one(self.scalars()) if self._rows else None

    def scalar_one(self) -> Any:
        """The first column of the one row."""
        return _one(self.scalars())


def _one(found: list[Any]) -> Any:
    (one,) = found
    return one


@cache
def _row_of(columns: tuple[str, ...]) -> Callable[[Any], Any]:
    named: Any = namedtuple
    made: Callable[[Any], Any] = named("Row", columns, rename=True)._make
    return made


class Statement:
    """A statement, built once per dialect and schema. Call it with a connection and its parameters."""

    __slots__ = ("_built", "_sql")

    def __init__(self, sql: str) -> None:
        self._sql = sql
        self._built: dict[tuple[str, str | None], _Built] = {}

    def __call__(self, conn: Connection, **parameters: Any) -> Found:
        options = conn.get_execution_options()
        key = (conn.dialect.name, options.get(SCHEMA_OPTION))
        built = self._built.get(key)
        if built is None:
            built = self._built[key] = _Built(render(self._sql, *key), conn.dialect)
        if options.get(OURS_OPTION) and not conn.dispatch.before_cursor_execute:
            return built.directly(conn, parameters)
        return built.through(conn, parameters)


class _Built:
    """A statement for one dialect and schema.

    On connections of our own engine it goes to the driver's cursor directly: SQLAlchemy's own way costs ten times
    what SQLite takes to carry it out. Where there are event hooks, and on the user's connections, whatever driver is
    beneath, it goes that way.
    """

    __slots__ = ("clause", "names", "sql")

    def __init__(self, sql: str, dialect: Dialect) -> None:
        self.clause = text(sql)
        compiled: Any = self.clause.compile(dialect=dialect)
        self.sql = str(compiled)
        self.names: list[str] | None = compiled.positiontup

    def through(self, conn: Connection, parameters: dict[str, Any]) -> Found:
        result = conn.execute(self.clause, parameters)
        if not result.returns_rows:
            return Found((), (), result.rowcount)
        return Found(tuple(result.keys()), result.all(), result.rowcount)

    def directly(self, conn: Connection, parameters: dict[str, Any]) -> Found:
        if not conn.in_transaction():
            conn.begin()  # as SQLAlchemy does by itself
        names = self.names
        given: Any = parameters if names is None else [parameters[name] for name in names]
        cursor = conn.connection.cursor()
        try:
            cursor.execute(self.sql, given)
            told = cursor.description
            if told is None:
                return Found((), (), cursor.rowcount)
            return Found(tuple([column[0] for column in told]), cursor.fetchall(), cursor.rowcount)
        except conn.dialect.loaded_dbapi.Error as error:
            raise _refusal(conn, self.sql, error) from error
        finally:
            cursor.close()


def _refusal(conn: Connection, sql: str, error: Exception) -> BaseException:
    """The driver's error as SQLAlchemy tells it. A connection that is lost is found out by SQLAlchemy itself."""
    dialect: Any = conn.dialect
    if dialect.is_disconnect(error, conn.connection.dbapi_connection, None):
        conn.exec_driver_sql("SELECT 1")
    return DBAPIError.instance(sql, None, error, dialect.loaded_dbapi.Error, hide_parameters=True, dialect=dialect)


def as_json(value: object) -> str:
    """The JSON text of a statement's `rows`, `list` or `ints` parameter: a sequence of mappings, structs or scalars."""
    return msgspec.json.encode(value).decode()


def render(sql: str, dialect: str, schema: str | None) -> str:
    """The statement's text for one dialect and schema."""
    marks = _POSTGRES if dialect == "postgresql" else _SQLITE
    rows = _postgres_rows if dialect == "postgresql" else _sqlite_rows
    prefix = f'"{schema}".{PREFIX}' if schema else PREFIX
    sql = _ROWS.sub(lambda m: rows(m[1], [c.split() for c in m[2].split(",")]), sql)
    sql = _LIST.sub(lambda m: marks[m[1]].format(name=m[2]), sql)
    for mark in ("json_agg", "for_update", "skip_locked", "bytewise", "now_rows"):
        sql = sql.replace("{" + mark + "}", marks[mark])
    return sql.replace("{p}", prefix)


_POSTGRES: Mapping[str, str] = {
    "list": '(SELECT value COLLATE "C" AS value FROM json_array_elements_text(CAST(:{name} AS json))) AS {name}',
    "ints": "(SELECT CAST(value AS bigint) AS value FROM json_array_elements_text(CAST(:{name} AS json))) AS {name}",
    "in_list": '= ANY(ARRAY(SELECT value COLLATE "C" FROM json_array_elements_text(CAST(:{name} AS json))))',
    "in_ints": "= ANY(ARRAY(SELECT CAST(value AS bigint) FROM json_array_elements_text(CAST(:{name} AS json))))",
    "json_agg": "json_agg",
    "for_update": "FOR UPDATE",
    "skip_locked": "FOR UPDATE SKIP LOCKED",
    "bytewise": 'COLLATE "C"',
    "now_rows": "MATERIALIZED",
}
_SQLITE: Mapping[str, str] = {
    "list": "(SELECT value FROM json_each(:{name})) AS {name}",
    "ints": "(SELECT value FROM json_each(:{name})) AS {name}",
    "in_list": "IN (SELECT value FROM json_each(:{name}))",
    "in_ints": "IN (SELECT value FROM json_each(:{name}))",
    "json_agg": "json_group_array",
    "for_update": "",
    "skip_locked": "",
    "bytewise": "",
    "now_rows": "MATERIALIZED",
}


def _postgres_rows(name: str, columns: list[list[str]]) -> str:
    types = {"int": "bigint", "text": 'text COLLATE "C"'}
    record = ", ".join(f"{column} {types[kind]}" for column, kind in columns)
    names = ", ".join(column for column, _ in columns)
    return (
        f"(SELECT {names}, ord - 1 AS ord FROM ROWS FROM (json_to_recordset(CAST(:{name} AS json)) "
        f"AS ({record})) WITH ORDINALITY AS {name}_rows({names}, ord)) AS {name}"
    )


def _sqlite_rows(name: str, columns: list[list[str]]) -> str:
    picked = ", ".join(f"json_extract(value, '$.{column}') AS {column}" for column, _ in columns)
    return f"(SELECT {picked}, key AS ord FROM json_each(:{name})) AS {name}"
