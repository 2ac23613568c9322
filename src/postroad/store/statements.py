"""SQL that is written once and runs on SQLite and on Postgres. Every difference of the dialects is a line here.

A statement is text with marks in braces:

    {p}                         the prefix of our tables, with the schema where there is one
    {rows:name(a text, b int)}  the rows of the JSON parameter `name` as a table; it also has `ord`, from 0
    {list:name}                 the strings of the JSON array `name`, as a table with the one column `value`
    {ints:name}                 the integers of the JSON array `name`, likewise
    {in_list:name} {in_ints:name}  "is one of" them, in a form that is always looked up one by one
    {pairs:column}              the keys and texts of a JSON object in a column, as a table (key, value)
    {json_agg}                  the aggregate that makes a JSON array
    {for_update} {skip_locked}  row locks, where there are such
    {bytewise}                  the collation of our text columns, for text that a parameter brought
    {now_rows}                  a hint that a CTE is computed once
    {among:name.column}         "is one of" the texts in a column of its rows: a hint, they are compared with it anyway

A statement for `for_rows` has one `FROM {rows:name(...)}` and writes its columns as `name.column`: they are parameters
where there is one row.
"""

import re
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from operator import attrgetter, itemgetter
from typing import Any, Literal, TypeVar

import msgspec
from sqlalchemy import Connection, Dialect, text
from sqlalchemy.exc import DBAPIError

from postroad.store.schema import PREFIX

SCHEMA_OPTION = "postroad_schema"
OURS_OPTION = "postroad_ours"
S = TypeVar("S", bound=msgspec.Struct)
Form = Literal["objects", "arrays", "one"]  # of a statement's rows: in a JSON parameter, or column by column
Row = Any  # a named tuple of the columns that a statement names
_ROWS = re.compile(r"\{rows:(\w+)\(([^)]*)\)\}")
_FROM_ROWS = re.compile(r"\bFROM \{rows:(\w+)\(([^)]*)\)\}")
_AMONG = re.compile(r"\{among:(\w+)\.(\w+)\}")
_LIST = re.compile(r"\{(list|ints|in_list|in_ints|pairs):([\w.]+)\}")


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
        self._built: dict[tuple[str, str | None, Form], _Built] = {}

    def __call__(self, conn: Connection, **parameters: Any) -> Found:
        return self._for(conn, "objects")(conn, parameters)

    def for_rows(self, conn: Connection, rows: Sequence[Any], **parameters: Any) -> Found:
        """Call it for rows, all structs or all mappings: as one JSON parameter, or one by itself column by column.

        On Postgres unfolding JSON takes 0.1 ms, however little it is, and that is half of what a row takes. SQLite
        finds a column of an array faster than one of an object.
        """
        if len(rows) == 1:
            return self._for(conn, "one")(conn, {**msgspec.to_builtins(rows[0]), **parameters})
        (name, columns) = _FROM_ROWS.findall(self._sql)[0]
        if conn.dialect.name == "postgresql" or not rows:
            return self(conn, **{name: as_json(rows)}, **parameters)
        names = [column for column, _ in _columns(columns)]
        pick: Any = itemgetter(*names) if isinstance(rows[0], Mapping) else attrgetter(*names)
        return self._for(conn, "arrays")(conn, {name: as_json(list(map(pick, rows))), **parameters})

    def _for(self, conn: Connection, form: Form) -> "_Built":
        key = (conn.dialect.name, conn.get_execution_options().get(SCHEMA_OPTION), form)
        built = self._built.get(key)
        if built is None:
            built = self._built[key] = _Built(render(self._sql, key[0], key[1], form), conn.dialect)
        return built


class _Built:
    """A statement for one dialect and schema. Call it with a connection and its parameters.

    On connections of our own engine it goes to the driver's cursor directly: SQLAlchemy's own way costs ten times
    what SQLite takes to carry it out. Where there are event hooks, and on the user's connections, whatever driver is
    beneath, it goes that way.
    """

    __slots__ = ("_clause", "_names", "_sql")

    def __init__(self, sql: str, dialect: Dialect) -> None:
        self._clause = text(sql)
        compiled: Any = self._clause.compile(dialect=dialect)
        self._sql = str(compiled)
        self._names: list[str] | None = compiled.positiontup

    def __call__(self, conn: Connection, parameters: dict[str, Any]) -> Found:
        if conn.get_execution_options().get(OURS_OPTION) and not conn.dispatch.before_cursor_execute:
            return self._directly(conn, parameters)
        return self._through(conn, parameters)

    def _through(self, conn: Connection, parameters: dict[str, Any]) -> Found:
        result = conn.execute(self._clause, parameters)
        if not result.returns_rows:
            return Found((), (), result.rowcount)
        return Found(tuple(result.keys()), result.all(), result.rowcount)

    def _directly(self, conn: Connection, parameters: dict[str, Any]) -> Found:
        if not conn.in_transaction():
            conn.begin()  # as SQLAlchemy does by itself
        names = self._names
        given: Any = parameters if names is None else [parameters[name] for name in names]
        cursor = conn.connection.cursor()
        try:
            cursor.execute(self._sql, given)
            told = cursor.description
            if told is None:
                return Found((), (), cursor.rowcount)
            return Found(tuple([column[0] for column in told]), cursor.fetchall(), cursor.rowcount)
        except conn.dialect.loaded_dbapi.Error as error:
            raise refusal(conn, self._sql, error) from error
        finally:
            cursor.close()


def refusal(conn: Connection, sql: str, error: Exception) -> BaseException:
    """The driver's error as SQLAlchemy tells it. A connection that is lost is found out by SQLAlchemy itself."""
    dialect: Any = conn.dialect
    if dialect.is_disconnect(error, conn.connection.dbapi_connection, None):
        conn.exec_driver_sql("SELECT 1")
    return DBAPIError.instance(sql, None, error, dialect.loaded_dbapi.Error, hide_parameters=True, dialect=dialect)


def as_json(value: object) -> str:
    """The JSON text of a statement's `rows`, `list` or `ints` parameter: a sequence of mappings, structs or scalars."""
    return msgspec.json.encode(value).decode()


def render(sql: str, dialect: str, schema: str | None, form: Form = "objects") -> str:
    """The statement's text for one dialect and schema."""
    marks = _POSTGRES if dialect == "postgresql" else _SQLITE
    prefix = f'"{schema}".{PREFIX}' if schema else PREFIX
    if form == "one":
        sql = _of_one(sql, marks)
    sql = _AMONG.sub(lambda m: marks["among"].format(name=m[1], column=m[2]), sql)
    rows = _postgres_rows if dialect == "postgresql" else partial(_sqlite_rows, form)
    sql = _ROWS.sub(lambda m: rows(m[1], _columns(m[2])), sql)
    sql = _LIST.sub(lambda m: marks[m[1]].format(name=m[2]), sql)
    for mark in ("json_agg", "for_update", "skip_locked", "bytewise", "now_rows"):
        sql = sql.replace("{" + mark + "}", marks[mark])
    return sql.replace("{p}", prefix)


def _of_one(sql: str, marks: Mapping[str, str]) -> str:
    """The statement with a parameter in the place of each column of its rows, and without these and their order."""
    (name, columns) = _FROM_ROWS.findall(sql)[0]
    sql = re.sub(rf"ORDER BY {name}\.\w+(, {name}\.\w+)*", "", _FROM_ROWS.sub("", sql))
    sql = _AMONG.sub(r"= \1.\2", sql)
    for column, kind in _columns(columns):
        sql = re.sub(rf"\b{name}\.{column}\b", marks[kind].format(name=column), sql)
    return sql


_POSTGRES: Mapping[str, str] = {
    "list": '(SELECT value COLLATE "C" AS value FROM json_array_elements_text(CAST(:{name} AS json))) AS {name}',
    "ints": "(SELECT CAST(value AS bigint) AS value FROM json_array_elements_text(CAST(:{name} AS json))) AS {name}",
    "in_list": '= ANY(ARRAY(SELECT value COLLATE "C" FROM json_array_elements_text(CAST(:{name} AS json))))',
    "in_ints": "= ANY(ARRAY(SELECT CAST(value AS bigint) FROM json_array_elements_text(CAST(:{name} AS json))))",
    "pairs": "json_each_text(CAST({name} AS json))",
    "among": "= ANY(ARRAY(SELECT {column} FROM json_to_recordset(CAST(:{name} AS json)) "
    'AS ({column} text COLLATE "C")))',
    "text": 'CAST(:{name} AS text) COLLATE "C"',
    "int": "CAST(:{name} AS bigint)",
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
    "pairs": "json_each({name})",
    "among": "= {name}.{column}",
    "text": ":{name}",
    "int": ":{name}",
    "json_agg": "json_group_array",
    "for_update": "",
    "skip_locked": "",
    "bytewise": "",
    "now_rows": "MATERIALIZED",
}


def _columns(listed: str) -> list[list[str]]:
    """Name and type of each."""
    return [column.split() for column in listed.split(",")]


def _postgres_rows(name: str, columns: list[list[str]]) -> str:
    types = {"int": "bigint", "text": 'text COLLATE "C"'}
    record = ", ".join(f"{column} {types[kind]}" for column, kind in columns)
    names = ", ".join(column for column, _ in columns)
    return (
        f"(SELECT {names}, ord - 1 AS ord FROM ROWS FROM (json_to_recordset(CAST(:{name} AS json)) "
        f"AS ({record})) WITH ORDINALITY AS {name}_rows({names}, ord)) AS {name}"
    )


def _sqlite_rows(form: Form, name: str, columns: list[list[str]]) -> str:
    paths = [f"[{place}]" if form == "arrays" else f".{column}" for place, (column, _) in enumerate(columns)]
    picked = ", ".join(f"json_extract(value, '${path}') AS {c}" for path, (c, _) in zip(paths, columns, strict=True))
    return f"(SELECT {picked}, key AS ord FROM json_each(:{name})) AS {name}"
