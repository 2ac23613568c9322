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
from collections.abc import Mapping
from typing import Any

import msgspec
from sqlalchemy import Connection, CursorResult, TextClause, text

from postroad.store.schema import PREFIX

SCHEMA_OPTION = "postroad_schema"
_ROWS = re.compile(r"\{rows:(\w+)\(([^)]*)\)\}")
_LIST = re.compile(r"\{(list|ints|in_list|in_ints):(\w+)\}")


class Statement:
    """A statement, built once per dialect and schema. Call it with a connection and its parameters."""

    __slots__ = ("_built", "_sql")

    def __init__(self, sql: str) -> None:
        self._sql = sql
        self._built: dict[tuple[str, str | None], TextClause] = {}

    def __call__(self, conn: Connection, **parameters: Any) -> CursorResult[Any]:
        schema = conn.get_execution_options().get(SCHEMA_OPTION)
        key = (conn.dialect.name, schema)
        clause = self._built.get(key)
        if clause is None:
            clause = self._built[key] = text(render(self._sql, *key))
        return conn.execute(clause, parameters)


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
